"""Models in memory draw what diffusion.generate draws, one request at a time, until they are stopped."""

import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch
from PIL import Image

from diffusion.contracts.errors import InputError
from diffusion.serving import image_server as room
from diffusion.serving.image_server import DrawingRequest, ImageServer, Limits, Stopped, load
from diffusion.stand_in import write_pipeline
from tests.conftest import run_here

REQUEST = DrawingRequest('a large red circle', seed=7, guidance=3.5, steps=3, num_images=5)
LIMITS = Limits(16, 100)


@pytest.fixture
def two(base, base_xl, tmp_path):
    return ImageServer(load([base, base_xl]), tmp_path, LIMITS, batch_size=2)


def nobody(*_):
    pass


def drawn_by_generate(model, request, out, *options):
    arguments = [word for _ in range(request.num_images) for word in ('--prompt', request.prompt)]
    run_here('diffusion.generate', model, out, *arguments, '--seed', request.seed, '--guidance', request.guidance, '--steps', request.steps, *options)
    return [path.read_bytes() for path in sorted(out.glob('0*.png'))]


def test_the_files_are_those_of_generate(two, base, base_xl, tmp_path_factory):
    """Two full batches and half a one; texts inside included."""
    for model, folder in zip(two.models, (base, base_xl), strict=True):
        ours = two.draw(model, REQUEST, threading.Event(), nobody)
        theirs = drawn_by_generate(folder, REQUEST, tmp_path_factory.mktemp('generate') / 'out', '--batch-size', 2)
        assert [file.read_bytes() for file in ours.files] == theirs
        assert len(set(theirs)) == 5
        texts = {'prompt': 'a large red circle', 'seed': '9', 'guidance': '3.5', 'steps': '3', 'precision': 'fp32', 'model': folder.name}
        with Image.open(ours.files[2]) as image:
            assert image.info == texts
        assert ours.elapsed_sec > 0


def test_a_flow_transformer_draws_the_same_images(encoders_folder, tmp_path):
    shutil.copytree(encoders_folder, tmp_path / 'prx')
    write_pipeline(tmp_path / 'prx', 'tiny-prx')
    request = replace(REQUEST, num_images=2, size=(48, 32))
    (tmp_path / 'image_server').mkdir()
    image_server = ImageServer(load([tmp_path / 'prx']), tmp_path / 'image_server', LIMITS, batch_size=16)
    steps = []
    ours = image_server.draw(image_server.models[0], request, threading.Event(), lambda done, total: steps.append((done, total)))
    assert [file.read_bytes() for file in ours.files] == drawn_by_generate(tmp_path / 'prx', request, tmp_path / 'out', '--size', '48x32')
    assert Image.open(ours.files[0]).size == (48, 32)
    assert steps == [(0, 6), (1, 6), (2, 6), (3, 6), (3, 6), (4, 6), (5, 6), (6, 6)]  # PRX draws one at a time


def test_another_size_is_that_of_generate_too(two, base, tmp_path_factory):
    request = replace(REQUEST, num_images=1, size=(32, 48))
    ours = two.draw(two.models[0], request, threading.Event(), nobody)
    assert [ours.files[0].read_bytes()] == drawn_by_generate(base, request, tmp_path_factory.mktemp('generate') / 'out', '--size', '32x48')


def test_tokens_that_no_text_encoder_reads_are_counted(two):
    for model in two.models:
        limit = model.pipeline.tokenizer.model_max_length
        words = limit - 2  # its first and last token are its own
        assert [model.num_unread_tokens(' '.join(['red'] * count)) for count in (1, words, words + 5)] == [0, 0, 5]


def test_a_drawing_stops_after_a_step(two):
    stop, steps = threading.Event(), []

    def on_step(done, total):
        steps.append(done)
        if done == 4:
            stop.set()

    with pytest.raises(Stopped):
        two.draw(two.models[0], REQUEST, stop, on_step)
    assert steps[-1] == 4
    with pytest.raises(Stopped):
        two.draw(two.models[0], REQUEST, stop, nobody)
    assert len(two.draw(two.models[0], REQUEST, threading.Event(), nobody).files) == 5
    two.closed.set()
    with pytest.raises(Stopped):
        two.draw(two.models[0], REQUEST, threading.Event(), nobody)


def test_one_drawing_at_a_time(two):
    running, most = set(), []

    def on_step(done, total):
        running.add(threading.get_ident())
        most.append(len(running))
        time.sleep(0.01)
        if done == total:
            running.discard(threading.get_ident())

    request = replace(REQUEST, num_images=2)
    threads = [threading.Thread(target=two.draw, args=(model, request, threading.Event(), on_step)) for model in two.models for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(most) == 2 * 5 + 2 * 4  # the sampler of Stable Diffusion 2 takes a step more


def test_full_memory_is_said_in_words(two, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')

    monkeypatch.setattr(room, 'draw', full)
    with pytest.raises(InputError, match='no memory left for 2 images of this size at once; ask for fewer'):
        two.draw(two.models[0], REQUEST, threading.Event(), nobody)


def test_files_of_old_drawings_go(two, tmp_path, monkeypatch):
    monkeypatch.setattr(room, 'KEPT_DRAWINGS', 2)
    request = replace(REQUEST, num_images=1, steps=1)
    drawings = [two.draw(two.models[0], request, threading.Event(), nobody).files[0] for _ in range(3)]
    assert [file.exists() for file in drawings] == [False, True, True]
    assert len(list(tmp_path.iterdir())) == 2


def test_models_of_one_name_are_told_apart_by_their_paths(base, tmp_path):
    for name in ('a', 'b'):
        shutil.copytree(base, tmp_path / name / 'model')
    assert [model.label for model in load([base])] == [base.name]
    folders = [tmp_path / 'a/model', tmp_path / 'b/model']
    models = load(folders)
    assert [model.label for model in models] == list(map(str, folders))
    image_server = ImageServer(models, tmp_path, LIMITS, 16)
    file = image_server.draw(models[0], replace(REQUEST, num_images=1), threading.Event(), nobody).files[0]
    assert file.parent.parent == tmp_path


def test_sizes_are_aspect_ratios_that_all_models_have(two):
    assert two.sizes() == []  # 32 pixels: there is nothing between
    larger = [replace(model, resolution=256) for model in two.models]
    sizes = ImageServer(larger, two._folder, LIMITS, 2).sizes()
    assert (320, 192) in sizes
    assert (256, 256) not in sizes
    assert all(0.7 < width * height / 256**2 <= 1.1 and width % 64 == height % 64 == 0 for width, height in sizes)
    assert ImageServer([larger[0], replace(larger[1], resolution=512)], two._folder, LIMITS, 2).sizes() == []
