"""Train a small feature network on an image MDS, to align networks with where DINOv2 cannot be had.

    python -m benchmarks.ablations.features IMAGES OUT PX

A vision transformer of DINOv2's architecture with patches of 8 px, which learns to name the words of a caption from the mean of its patches. What it
knows of a patch is what captions speak of: like DINOv2's features it says more about objects than about pixels.
"""

from pathlib import Path

from diffusion.common.arguments import CommandParser, positive_int
from diffusion.common.files import replacing_folder
from diffusion.common.processes import quick_imports

NUM_IMAGES, STEPS, BATCH_SIZE, LEARNING_RATE = 8192, 1000, 64, 1e-3
SIZES = {'hidden_size': 96, 'num_hidden_layers': 4, 'num_attention_heads': 4, 'patch_size': 8}


def main() -> None:
    parser = CommandParser('benchmarks.ablations.features', __doc__)
    parser.add_argument('images', type=Path, metavar='IMAGES', help='image MDS, as data_prep.convert writes it')
    parser.add_argument('out', type=Path, metavar='OUT', help='folder for config.json and model.safetensors')
    parser.add_argument('side_px', type=positive_int, metavar='PX', help='side of the squares that images are cut to')
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f'{args.out}: exists already; name a new folder')
    with quick_imports():
        network = train_features(args.images, args.side_px)
    with replacing_folder(args.out) as temporary:
        network.save_pretrained(temporary)


def train_features(folder: Path, side_px: int):
    """Dinov2Model, trained; what names the words is left out."""
    import torch
    from streaming import LocalDataset
    from tqdm import tqdm
    from transformers import Dinov2Config, Dinov2Model

    from diffusion.datasets.decode import open_image
    from diffusion.datasets.shards import words_in, words_of
    from diffusion.datasets.transforms import square
    from diffusion.encoders.patches import normalized

    dataset = LocalDataset(local=str(folder))
    samples = [dataset[i] for i in range(min(NUM_IMAGES, len(dataset)))]
    images = torch.stack([square(open_image(sample['image']), side_px) for sample in samples])  # (N, 3, S, S) uint8
    words = words_of(folder)
    named = [words_in(sample['caption']) for sample in samples]
    targets = torch.tensor([[word in caption for word in words] for caption in named], dtype=torch.float32)
    torch.manual_seed(0)
    network = Dinov2Model(Dinov2Config(**SIZES, image_size=images.shape[-1]))
    head = torch.nn.Linear(SIZES['hidden_size'], len(words))
    optimizer = torch.optim.AdamW([*network.parameters(), *head.parameters()], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    with tqdm(range(STEPS), desc='feature network', unit='step', mininterval=1) as progress:
        for step in progress:
            chosen = torch.randint(len(images), (BATCH_SIZE,))
            patches = network(pixel_values=normalized(images[chosen])).last_hidden_state[:, 1:]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(head(patches.mean(dim=1)), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                progress.set_postfix(loss=f'{loss.item():.3f}')
    return network.eval()


if __name__ == '__main__':
    main()
