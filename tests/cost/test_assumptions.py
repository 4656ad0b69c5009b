import numpy as np
import pytest

from diffusion.contracts.errors import InputError
from diffusion.cost.assumptions import Assumptions, draw_all, load_assumptions
from diffusion.cost.prices import load_prices
from diffusion.recipe.keys import known_paths, meaning


def test_what_is_shipped_is_complete_and_documented():
    assumptions, prices = load_assumptions(), load_prices()
    undocumented = {path for path in known_paths(Assumptions) if not meaning(Assumptions, path)}
    assert undocumented == {(name,) for name in ('preparation', 'online', 'storage', 'network', 'faults', 'work')}  # sections say it themselves
    names = [assumptions.preparation.machine, assumptions.storage.price, assumptions.network.put, assumptions.network.get, assumptions.network.egress,
             assumptions.work.person, *(size.gpu for size in assumptions.encoding.values())]  # fmt: skip
    assert all(prices[name].dollars >= 0 for name in names)


def test_a_file_and_the_command_line_change_some_of_it(tmp_path):
    (tmp_path / 'mine.yaml').write_text(
        'storage: {latent_months: 6, crawl_months: [1, 2]}\nencoding: {2048: {num_images: 1e6, images_per_gpu_sec: 10, gpu: null}}\n'
    )
    assumed = load_assumptions(
        tmp_path / 'mine.yaml', ['storage.crawl_months=3', 'encoding.512.num_images=[1e6,2e6]', 'preparation.downloaded_share=null']
    )
    assert (assumed.storage.latent_months, assumed.storage.crawl_months) == (6, 3)
    assert assumed.encoding['512'].num_images == [1e6, 2e6]
    assert assumed.encoding['2048'].images_per_gpu_sec == 10
    assert assumed.preparation.downloaded_share is None
    assert assumed.network == load_assumptions().network


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('storage.latent_month=3', "storage.latent_month: unknown key (command line); did you mean 'storage.latent_months'?"),
        ('preparation.downloaded_share=[0.5,1.2]', 'preparation.downloaded_share: [0.5, 1.2] is a share and at most 1'),
        ('faults.save_sec=abc', "faults.save_sec: 'abc' is neither a number nor a range"),
        ('faults.save_sec=null', 'faults.save_sec: None is neither a number nor a range'),
        ('work.person_months=[3,2]', 'work.person_months: [3, 2] is not a range'),
        ('work.person_months=-1', 'work.person_months: -1 must be at least 0'),
        ('network.shard_bytes=0', 'network.shard_bytes: 0 must be above 0'),
        ('encoding.512.images_per_gpu_sec=[0,5]', 'encoding.512.images_per_gpu_sec: [0, 5] must be above 0'),
        ('encoding.2048.num_images=5', 'encoding.2048.images_per_gpu_sec: missing'),
        ('encoding.large={num_images: 1, images_per_gpu_sec: 1, gpu: null}', "encoding.large: 'large' is not a resolution in pixels"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(override, message):
    with pytest.raises(InputError) as caught:
        load_assumptions(overrides=[override, 'storage.checkpoint_months=x'])
    assert message in str(caught.value)
    assert 'storage.checkpoint_months' in str(caught.value)  # all mistakes at once


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match='no such file'):
        load_assumptions(tmp_path / 'nothing.yaml')


def test_ranges_become_draws_and_points_stay():
    drawn = draw_all(load_assumptions(overrides=['work.person_months=4']), num_draws=500)
    assert drawn.work.person_months == 4
    assert drawn.storage.price == 'storage_tb_month.s3-standard'
    assert drawn.faults.gpu_hours_between_failures is None
    assert drawn.faults.save_sec.shape == (500,)
    both = drawn.encoding['256'].images_per_gpu_sec, drawn.encoding['512'].images_per_gpu_sec
    assert abs(np.corrcoef(*both)[0, 1]) < 0.2
