"""Results of evaluations as `diffusion.evaluate` writes them, made up: no model, no images scored."""

import json
import random

from PIL import Image, ImageDraw

from diffusion.evaluation.job.results import RESULT_NAME, VERSION, Protocol

PROMPTS = ['a red circle on the left of a blue square', 'a small green star', 'two yellow triangles', 'an orange pentagon in the corner of the image']
GUIDANCE = (1.5, 3.0, 5.0, 7.5)
MEANINGS = {
    'fid': ('Distance of two Gaussians fitted to the Inception features of real and drawn images.', True),
    'fid_clean': ('FID with antialiased bicubic resizing.', True),
    'kid': ('Squared maximum mean discrepancy of Inception features, unbiased; may be negative.', True),
    'cmmd': ('Maximum mean discrepancy of CLIP embeddings.', True),
    'clip': ('100 times the cosine of the embeddings of image and caption.', False),
    'precision': ('share of drawn images within the manifold of real ones', False),
    'recall': ('share of real images within the manifold of drawn ones', False),
}


def protocol(**changes):
    fields = {
        'preset': 'coco2014-30k', 'metrics': ('fid', 'fid_clean', 'kid', 'cmmd', 'clip', 'precision_recall'), 'samples': 30_000, 'guidance': GUIDANCE, 'steps': 50, 'sampler': 'DDIMScheduler',
        'seed': 0, 'resolution': 512, 'chunk': 16, 'precision': 'fp32', 'resize': 'short side to the resolution, centre crop',
        'extractors': {'inception': '6726825d' + 'a' * 56, 'clip-vit-l14': 'c' * 64},
        'prompts': {'source': 's3://data/coco2014-val', 'choice': 'one of each by a keyed draw', 'sha256': 'b' * 64},
        'real': {'kind': 'images', 'identity': 'd' * 64, 'count': 30_000},
    }  # fmt: skip
    return Protocol(**{**fields, **changes})


def metrics(position, shift=0.0):
    """Made-up values at one of GUIDANCE: a valley of the distances, a rising CLIP score."""
    valley = (position - 1) ** 2
    values = {
        'fid': {'value': 12.3 + 2.1 * valley + shift, 'error': 0.12, 'at_infinity': 11.2 + 2.1 * valley + shift, 'null': 1.9, 'null_count': 15_000},
        'fid_clean': {'value': 12.9 + 2.2 * valley + shift, 'error': 0.13, 'at_infinity': 11.9 + 2.2 * valley + shift, 'null': 2.0, 'null_count': 15_000},
        'kid': {'value': 0.0031 + 0.0008 * valley + shift / 2000, 'error': 0.00021, 'subsets_deviation': 0.0008, 'null': -0.0004, 'null_count': 15_000},
        'cmmd': {'value': 0.51 + 0.06 * valley + shift / 20, 'error': 0.011, 'unbiased': 0.505 + 0.06 * valley + shift / 20, 'null': 0.003, 'null_count': 15_000},
        'clip': {'value': 24.1 + 1.1 * position - 0.1 * valley - shift / 10, 'error': 0.018},
        'precision': {'value': 0.61 + 0.04 * position, 'null': 0.78, 'null_count': 15_000},
        'recall': {'value': 0.55 - 0.06 * position - shift / 100, 'null': 0.77, 'null_count': 15_000},
    }  # fmt: skip
    return {
        name: {**values[name], 'meaning': meaning, 'lower_is_better': lower, 'extractor': 'clip-vit-l14' if name == 'clip' else 'inception'}
        for name, (meaning, lower) in MEANINGS.items()
    }


def image(size, seed):
    drawn, rng = Image.new('RGB', (size, size), (20 * seed % 256, 90, 140)), random.Random(seed)
    for _ in range(12):
        x, y, side = (rng.randrange(size) for _ in range(3))
        ImageDraw.Draw(drawn).ellipse((x - side / 3, y - side / 3, x + side / 3, y + side / 3), fill=tuple(rng.randrange(256) for _ in range(3)))
    return drawn


def write_evaluation(folder, label='base', shift=0.0, prompts=PROMPTS, image_px=64, batches=100_000, num_pairs=3, names=tuple(MEANINGS), **changes):
    """Write OUT/evaluation.json with its images; `changes` are of the protocol.

    Args:
        shift: of all distances, for the worse.
        names: of the metrics; each figure takes a moment.
    """
    agreed = protocol(**changes)
    for name in ('samples', 'neighbours'):
        (folder / name).mkdir(parents=True)
    samples = {}
    for guidance in agreed.guidance:
        samples[str(guidance)] = [
            {'file': f'samples/{guidance}-{number}.png', 'id': number, 'prompt': prompt} for number, prompt in enumerate(prompts)
        ]
        for number, sample in enumerate(samples[str(guidance)]):
            image(image_px, 7 * number + int(guidance)).save(folder / sample['file'])
    pairs = []
    for number in range(num_pairs):
        for name in ('drawn', 'known'):
            image(image_px, number).save(folder / f'neighbours/{number}-{name}.png')
        pairs.append(
            {'drawn': f'neighbours/{number}-drawn.png', 'known': f'neighbours/{number}-known.png', 'key': f'train/00000.mds:{number}',
             'cosine': 0.97 - 0.03 * number, 'caption': [*prompts, ''][number % (len(prompts) + 1)], 'known_caption': f'known caption {number}'}
        )  # fmt: skip
    result = {
        'version': VERSION,
        'protocol': agreed.to_json(),
        'digest': agreed.digest,
        'model': {'where': f'runs/{label}/export', 'sha256': 'e' * 64, 'label': label, 'batches': batches},
        'real': {'where': 's3://data/coco2014-val', 'identity': 'd' * 64, 'count': agreed.real['count'], 'left_out': ''},
        'scores': [
            {'guidance': guidance, 'count': agreed.samples, 'metrics': {name: metrics(position, shift)[name] for name in names}} for position, guidance in enumerate(agreed.guidance)
        ],
        'neighbours': {
            'extractor': 'clip-vit-l14', 'guidance': agreed.guidance[-1], 'count_known': 1_000_000, 'threshold': 0.95, 'no_threshold': '', 'share_above': 0.0003, 'pairs': pairs,
        },
        'samples': samples,
        'seconds': 43_210.0,
        'images_per_sec': 2.78,
        'environment': {'device': 'NVIDIA H100 80GB HBM3', 'torch': '2.14.1', 'commit': 'abc1234'},
    }  # fmt: skip
    rewrite(folder, result)
    return result


def write_subject(folder, guidance=GUIDANCE, floor_sha256='f' * 64, num_photos=2, **options):
    """The same of a subject: CLIP-I with a floor that rises with guidance and a ceiling, photos, and what the model before fine-tuning drew."""
    result = write_evaluation(folder, guidance=guidance, names=('clip',), num_pairs=0, **options)
    result |= {'neighbours': None, 'photos': [], 'floor': {**result['model'], 'where': 'models/base', 'sha256': floor_sha256}}
    result['protocol']['prompts'] = {'from': 'file', 'class': 'dog'}
    for number, score in enumerate(result['scores']):
        value = {'value': 0.7 + 0.02 * number, 'error': 0.004, 'floor': 0.5 + 0.01 * number, 'ceiling': 0.83, 'lower_is_better': False}
        score['metrics'] = {'clip_i': {**value, 'meaning': 'mean cosine of drawn images and photos', 'extractor': 'clip-vit-l14'}}
    for samples in result['samples'].values():
        for sample in samples:
            sample['floor'] = sample['file'].replace('.png', '-floor.png')
            image(64, 100 + sample['id']).save(folder / sample['floor'])
    for number in range(num_photos):
        result['photos'].append(f'samples/photo-{number}.png')
        image(256, 200 + number).save(folder / result['photos'][-1])
    rewrite(folder, result)
    return result


def rewrite(folder, result):
    (folder / RESULT_NAME).write_text(json.dumps(result))
