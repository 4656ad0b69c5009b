"""Which weights are read, from where, and what is said when there are none; the network that needs none."""

import hashlib
from pathlib import Path

import huggingface_hub
import pytest
import torch

from diffusion.contracts.errors import EncoderError, InputError
from diffusion.evaluation.features.networks import EXTRACTORS, load_extractors, precise
from diffusion.evaluation.features.weights import WeightsSource, find_file, find_folder
from diffusion.evaluation.metrics.distances import kid
from tests.evaluation.networks import images


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Empty ones, and no way to the network."""
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path / 'torch'))
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))


@pytest.mark.parametrize('name', [name for name, known in EXTRACTORS.items() if known.source])
def test_without_weights_the_message_says_which_where_and_how(name, tmp_path):
    source = EXTRACTORS[name].source
    with pytest.raises(EncoderError) as error:
        load_extractors([name], tmp_path / 'weights')
    message = str(error.value)
    assert all(str(tmp_path / 'weights' / file) in message for file in source.files)
    assert source.hub in message
    assert source.sha256 in message
    assert source.size in message
    assert 'Get them with: ' + ('curl ' if source.url else 'hf download ') in message
    assert '--download' in message


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match='unknown feature networks resnet; known: inception, '):
        load_extractors(['inception', 'resnet'])


def test_a_file_is_found_in_the_folder_then_in_the_cache(tmp_path):
    content = b'weights'
    source = WeightsSource(('right.pth',), url='https://example.invalid/right.pth', sha256=hashlib.sha256(content).hexdigest()[:8])
    cached = tmp_path / 'torch' / 'checkpoints' / 'right.pth'
    cached.parent.mkdir(parents=True)
    cached.write_bytes(content)
    assert find_file('net', source, tmp_path / 'weights', download=False) == cached
    (tmp_path / 'weights').mkdir()
    (tmp_path / 'weights' / 'right.pth').write_bytes(b'others')
    with pytest.raises(EncoderError, match=f'expected {source.sha256}'):
        find_file('net', source, tmp_path / 'weights', download=False)


def test_nothing_is_downloaded_unless_asked_for(tmp_path, monkeypatch):
    asked = []

    def download(url: str, path: str, sha256: str | None, progress: bool) -> None:
        asked.append(('torch', url, sha256))
        Path(path).write_bytes(b'weights')

    def snapshot(repository: str, allow_patterns: list[str], local_files_only: bool) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError('not there')
        asked.append(('hub', repository, allow_patterns[-1]))
        folder = tmp_path / 'snapshot'
        folder.mkdir(exist_ok=True)
        if allow_patterns[-1] == 'pytorch_model.bin':  # this one was never published as safetensors
            (folder / 'pytorch_model.bin').touch()
        return str(folder)

    monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot)
    file, folder = WeightsSource(('net.pth',), url='https://example.invalid/net.pth'), WeightsSource(('clip',), hub='someone/clip')
    for allowed in (False, True):
        if not allowed:
            for find, source in ((find_file, file), (find_folder, folder)):
                with pytest.raises(EncoderError, match='or allow the download'):
                    find('net', source, tmp_path / 'weights', download=False)
            assert asked == []
    assert find_file('net', file, None, download=True).read_bytes() == b'weights'
    assert find_folder('net', folder, None, download=True) == tmp_path / 'snapshot'
    assert asked == [('torch', file.url, None), ('hub', 'someone/clip', 'model.safetensors'), ('hub', 'someone/clip', 'pytorch_model.bin')]


def test_a_download_that_fails_is_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, 'download_url_to_file', lambda *_, **__: (_ for _ in ()).throw(OSError('no route')))
    with pytest.raises(EncoderError, match=r'net: cannot be downloaded from https://example.invalid/net.pth: OSError: no route'):
        find_file('net', WeightsSource(('net.pth',), url='https://example.invalid/net.pth'), None, download=True)


def test_the_random_network_is_the_same_everywhere():
    """A change of its weights makes every distance with it another: the digest is in the protocol."""
    (network,) = load_extractors(['random-conv'])
    assert network.sha256 == 'febf1ed50f696b731a94658ce449ef52ad3595ef2e52dd89dcbc09a1f389b980'
    found = network.images(images(3, 40, seed=0))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {'random-conv': (3, network.features['random-conv'])}
    assert found['random-conv'].dtype == torch.float32


@pytest.mark.parametrize('change', ['noise', 'blur', 'darker', 'moved'])
def test_the_random_network_sees_what_is_wrong(change):
    """KID between sets of one law is small against that to images with too much noise, too little, other colours or another layout."""
    (network,) = load_extractors(['random-conv'])
    real, drawn = images(40, 64, seed=1), images(40, 64, seed=2)
    wrong = {
        'noise': lambda: images(40, 64, seed=2, noise=160),
        'blur': lambda: images(40, 64, seed=2, noise=5),
        'darker': lambda: (drawn * 0.8).to(torch.uint8),
        'moved': lambda: drawn.flip(3),
    }[change]()
    right, other = (kid(network.images(real)['random-conv'], network.images(part)['random-conv'], seed=0).value for part in (drawn, wrong))
    assert other > 3 * abs(right)


def test_networks_compute_in_float32_and_leave_the_settings():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = True
    with precise():
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        assert torch.is_inference_mode_enabled()
    assert torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark) == before
