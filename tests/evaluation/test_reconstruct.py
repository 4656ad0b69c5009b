"""Scoring autoencoders: figures against plain diffusers, what is refused, counted and warned of, the page and the sheet."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import save_file
from streaming import LocalDataset

from diffusion.contracts.errors import EncoderError, InputError
from diffusion.datasets.decode import open_image
from diffusion.encoders.frozen import Vae
from diffusion.encoders.random_encoders import build_vae
from diffusion.evaluation.job.reconstructing import GAIN, difference, reconstruct
from diffusion.evaluation.job.request import ReconstructionRequest
from diffusion.evaluation.pages.page import write_page
from tests.conftest import NUM_IMAGES, RESOLUTION, read_json, run_here, run_python
from tests.evaluation.examples import write_evaluation
from tests.evaluation.networks import write_vgg16
from tests.monitoring.report.pages import assert_stands_alone

FREE = 'psnr,ssim,lpips@random-conv,fid@random-conv'


@pytest.fixture(scope='module')
def other(tmp_path_factory):
    """An AutoencoderKL alone: f2 c3, with scale and shift."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp('other') / 'half'
    build_vae((8, 8), latent_channels=3, norm_num_groups=4, scaling_factor=0.7, shift_factor=0.1).save_pretrained(folder)
    return folder


@pytest.fixture(scope='module')
def scored(images, encoders_folder, other, tmp_path_factory):
    """(OUT, what was printed) of a process of its own."""
    out = tmp_path_factory.mktemp('scored') / 'out'
    process = run_python('-m', 'diffusion.reconstruct', encoders_folder, other, '--data', images, '--out', out, '--metrics', FREE)
    return out, process


def score(vaes, images, out, metrics='psnr', **options):
    request = ReconstructionRequest(vaes=list(map(str, vaes)), data=str(images), out=out, metrics=tuple(metrics.split(',')), **options)
    return reconstruct(request, torch.device('cpu'))


def pixels_of(images):
    dataset = LocalDataset(local=str(images))
    return torch.stack([torch.from_numpy(np.array(open_image(dataset[i]['image']))).permute(2, 0, 1) for i in range(len(dataset))])


def test_figures_and_latents_are_those_of_plain_diffusers(scored, images, encoders_folder, other):
    out, _ = scored
    result, originals = read_json(out / 'reconstruction.json'), pixels_of(images)
    assert (result['protocol']['resolution'], result['real']['count'], result['enlarged']) == (RESOLUTION, NUM_IMAGES, 0)
    for record, folder in zip(result['autoencoders'], (encoders_folder / 'vae', other), strict=True):
        vae = AutoencoderKL.from_pretrained(folder)
        with torch.no_grad():
            posterior = vae.encode(originals / 127.5 - 1).latent_dist
            decoded = vae.decode(posterior.mean).sample
        levels = ((decoded.clamp(-1, 1) + 1) * 127.5).round().double()
        ratios = 10 * np.log10(255**2 / ((levels - originals) ** 2).mean(dim=(1, 2, 3)).numpy())
        assert record['metrics']['psnr']['value'] == pytest.approx(ratios.mean(), abs=2e-3)
        assert record['metrics']['psnr']['error'] == pytest.approx(ratios.std(ddof=1) / np.sqrt(len(ratios)), rel=1e-2)
        assert record['latent_channels'] == vae.config.latent_channels
        assert record['num_parameters'] == sum(p.numel() for p in vae.parameters())
        mean, variance = posterior.mean.double(), posterior.var.double()
        assert record['latents']['mean'] == pytest.approx(float(mean.mean()), abs=1e-5)
        assert record['latents']['std'] == pytest.approx(float((variance.mean() + mean.var(correction=0)).sqrt()), rel=1e-4)
        scaled = (record['latents']['mean'] - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
        assert any('shift_factor' in line for line in record['warnings']) == (abs(scaled) > 0.05)
    assert [record['downsampling'] for record in result['autoencoders']] == [4, 2]


def test_what_is_printed(scored):
    out, process = scored
    assert f'{NUM_IMAGES} images of {RESOLUTION} px' in process.stdout
    result = read_json(out / 'reconstruction.json')
    for record in result['autoencoders']:
        assert record['name'] in process.stdout
        assert all(f'{record["name"]}: {line}' in process.stdout for line in record['warnings'])
    assert '| f2 c3 ' in process.stdout
    assert result['digest'] in process.stdout
    assert 'image/s' in process.stderr  # the progress bar


def test_the_page_has_every_figure_and_stands_alone(scored):
    out, _ = scored
    result = read_json(out / 'reconstruction.json')
    page = assert_stands_alone((out / 'reconstruction.html').read_text())
    for record in result['autoencoders']:
        (cells,) = [
            row[1:]
            for row in page.rows
            if row and row[0].split() == [*record['name'].split(), f'f{record["downsampling"]}', f'c{record["latent_channels"]}']
        ]
        assert len(cells) == 4 + 3  # of the latents, and the speed
        assert float(cells[0].split()[0]) == pytest.approx(record['metrics']['psnr']['value'], abs=0.005)
        assert record['sha256'] in page.text
        assert all(line in page.text for line in record['warnings'])
    assert result['digest'] in page.text
    for text in ('no published feature network', 'PSNR (dB) ↑', 'rFID (random-conv) ↓', 'original', f'{GAIN} × difference'):
        assert text in page.text
    assert len(page.attributes('img')) == 12 * 5  # 8 first and 4 worst; the original, two reconstructions and two differences


def test_the_sheet_shows_originals_reconstructions_and_differences(scored, images):
    out, _ = scored
    found = Image.open(out / 'reconstruction.png')
    side = 128  # 32 px, enlarged by a whole factor
    assert found.size == (12 * (side + 2) - 2, 5 * (18 + side + 2))
    first = np.asarray(found.crop((0, 18, side, 18 + side)).resize((RESOLUTION, RESOLUTION), Image.Resampling.NEAREST))
    assert any(np.array_equal(first, original.permute(1, 2, 0).numpy()) for original in pixels_of(images))
    assert found.text['protocol'] == read_json(out / 'reconstruction.json')['digest']


def test_a_difference_is_absolute_brighter_and_cut_off():
    original, made = (Image.new('RGB', (1, 1), colour) for colour in ((10, 100, 200), (13, 90, 10)))
    assert difference(made, original).getpixel((0, 0)) == (3 * GAIN, 10 * GAIN, 255)


def test_a_perfect_autoencoder_has_perfect_figures(images, encoders_folder, tmp_path, monkeypatch):
    """And LPIPS with weights of VGG16 from a folder: its network is in the protocol."""
    monkeypatch.setattr(Vae, 'decode', lambda self, latents: self.seen)
    monkeypatch.setattr(Vae, 'encode', lambda self, originals: setattr(self, 'seen', originals) or torch.randn(len(originals), 8, 8, 8))
    write_vgg16(tmp_path / 'vgg16.pth')
    save_file(torch.load(tmp_path / 'vgg16.pth', weights_only=True), tmp_path / 'vgg16.safetensors')
    result = score([encoders_folder], images, tmp_path / 'out', f'{FREE},lpips', weights=tmp_path, samples=16)
    values = {name: value['value'] for name, value in result['autoencoders'][0]['metrics'].items()}
    assert values['psnr'] > 80
    assert values['ssim'] == pytest.approx(1, abs=1e-4)
    assert values['lpips'] == values['lpips@random-conv'] == 0
    assert values['fid@random-conv'] == pytest.approx(0, abs=1e-3)
    assert set(result['protocol']['extractors']) == {'lpips', 'lpips@random-conv', 'random-conv'}
    assert result['standings'] == {}
    assert len(result['autoencoders'][0]['samples']) == 12


def test_the_same_autoencoder_twice_is_a_tie_and_a_worse_one_is_none(images, encoders_folder, tmp_path):
    """Copies tie with themselves; one whose decoder is black is behind by more than chance."""
    black = tmp_path / 'black'
    vae = AutoencoderKL.from_pretrained(encoders_folder / 'vae')
    with torch.no_grad():
        vae.decoder.conv_out.weight.zero_()
        vae.decoder.conv_out.bias.fill_(-1)
    vae.save_pretrained(black)
    folders = [encoders_folder, encoders_folder / 'vae', black]
    result = score(folders, images, tmp_path / 'out', 'psnr,fid@random-conv', samples=16)
    names = [record['name'] for record in result['autoencoders']]
    assert len(set(names)) == 3
    for name, standing in result['standings'].items():
        values = {record['name']: record['metrics'][name]['value'] for record in result['autoencoders']}
        assert values[names[0]] == values[names[1]]
        chosen = min if name.startswith('fid') else max
        assert values[standing['best']] == chosen(values.values())
        if standing['best'] in names[:2]:
            assert standing['tied'] == [names[1]]
        else:
            assert standing == {'best': names[2], 'tied': []}
    write_page([tmp_path / 'out'], tmp_path / 'page.html')
    assert 'class="tied">≈' in (tmp_path / 'page.html').read_text()


def test_files_that_are_left_out_and_images_that_are_enlarged_are_counted(encoders_folder, tmp_path):
    folder = tmp_path / 'photos'
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(18):
        Image.fromarray(rng.integers(0, 256, (20 if i < 3 else 40, 44, 3), dtype=np.uint8)).save(folder / f'{i}.png')
    Image.new('RGB', (8, 8)).save(folder / 'a.tiff')
    (folder / 'b.png').write_bytes(b'nothing')
    said = run_here('diffusion.reconstruct', encoders_folder, '--data', folder, '--out', tmp_path / 'out', '--metrics', 'psnr', '--resolution', 32)
    result = read_json(tmp_path / 'out/reconstruction.json')
    assert (result['real']['count'], result['enlarged']) == (18, 3)
    assert '2 files' in result['real']['left_out']
    page = assert_stands_alone((tmp_path / 'out/reconstruction.html').read_text())
    for text in ('Not among the images: 2 files', '3 images are smaller than 32 px and enlarged'):
        assert text in page.text
        assert text in said.stdout


def test_what_cannot_be_scored_is_refused_with_the_remedy(images, encoders_folder, tmp_path):
    def refused(*arguments, vae=encoders_folder, out=None):
        return run_here(
            'diffusion.reconstruct', vae, '--data', images, '--out', out or tmp_path / 'new', '--metrics', 'psnr', *arguments, code=2
        ).stderr

    assert 'no such folder; name a local folder' in refused(vae=tmp_path / 'nowhere')
    assert 'holds no autoencoder' in refused(vae=images)
    wrong = tmp_path / 'wrong'
    shutil.copytree(encoders_folder / 'vae', wrong)
    config = {**read_json(wrong / 'config.json'), '_class_name': 'AutoencoderDC'}
    (wrong / 'config.json').write_text(json.dumps(config))
    assert 'is of AutoencoderDC; only AutoencoderKL is scored' in refused(vae=wrong)
    assert 'has to be a multiple of 4' in refused('--resolution', 30)
    assert 'too small for psnr; the least is 16 px' in refused('--resolution', 8)
    assert 'at least 16 are needed' in refused('--samples', 3)
    assert f'holds {NUM_IMAGES} images, 1,000 are asked for' in refused('--samples', 1000)
    assert 'holds something else already' in refused(out=encoders_folder)
    assert "did you mean 'psnr'" in refused('--metrics', 'pnsr')
    assert not (tmp_path / 'new').exists()


def test_damaged_weights_are_named(images, encoders_folder, tmp_path):
    vae = AutoencoderKL.from_pretrained(encoders_folder / 'vae')
    with torch.no_grad():
        vae.encoder.conv_in.bias[0] = float('nan')
    vae.save_pretrained(tmp_path / 'nan')
    with pytest.raises(EncoderError, match=r'1 NaN or infinite \(encoder.conv_in.bias\)'):
        score([tmp_path / 'nan'], images, tmp_path / 'out', samples=16)


def test_an_earlier_result_is_replaced(images, encoders_folder, tmp_path):
    for samples in (16, 17):
        score([encoders_folder], images, tmp_path / 'out', samples=samples)
    assert read_json(tmp_path / 'out/reconstruction.json')['real']['count'] == 17


def test_the_sheet_holds_any_name(images, encoders_folder, tmp_path):
    named = tmp_path / '<b>é漢字<b>'
    shutil.copytree(encoders_folder / 'vae', named)
    result = score([named], images, tmp_path / 'out', samples=16)
    assert result['autoencoders'][0]['name'] == named.name
    with Image.open(tmp_path / 'out/reconstruction.png') as found:
        assert found.width == 12 * 130 - 2
    write_page([tmp_path / 'out'], tmp_path / 'page.html')
    assert '<b>é' not in (tmp_path / 'page.html').read_text()


def test_results_of_several_commands_are_compared_on_one_page(images, encoders_folder, other, tmp_path):
    """Next to each other if their protocols are equal; models of images, which have another protocol, are apart."""
    score([encoders_folder], images, tmp_path / 'one', samples=16)
    score([other], images, tmp_path / 'two', samples=16)
    write_evaluation(tmp_path / 'model', names=('fid',))
    folders = [tmp_path / name for name in ('one', 'two', 'model')]
    write_page(folders, tmp_path / 'page.html')
    page = assert_stands_alone((tmp_path / 'page.html').read_text())
    names = [name for name in (encoders_folder.name, other.name) if any(row and row[0].split()[:1] == [name] for row in page.rows)]
    assert names == [encoders_folder.name, other.name]
    assert 'These models were evaluated by 2 protocols' in page.text
    assert page.row('FID ↓')


@pytest.mark.parametrize('damage', ['protocol', 'latents', 'samples', 'standings', 'version'])
def test_a_result_of_another_shape_is_named(damage, images, encoders_folder, tmp_path, scored):
    result = read_json(scored[0] / 'reconstruction.json')
    for place in (result, result['autoencoders'][0]):
        if damage in place:
            place[damage] = {'mean': 0.0} if isinstance(place[damage], dict) else 7
    (tmp_path / 'reconstruction.json').write_text(json.dumps(result))
    with pytest.raises(InputError, match=rf'{tmp_path}/reconstruction.json: .*{damage}.*; reconstruct again'):
        write_page([tmp_path], tmp_path / 'page.html')
