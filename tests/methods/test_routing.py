"""Token routing, against blocks that are called by hand on the tokens that stay."""

import math

import pytest
import torch
from diffusers.models.transformers.transformer_prx import get_image_ids, img2seq, seq2img
from torch.utils.flop_counter import FlopCounterMode

from diffusion.datasets.keyed_random import by_id
from diffusion.families.networks import find_network
from diffusion.families.registry import attach_methods, family_of, training_flops
from diffusion.methods.routing import kept_tokens
from diffusion.recipe import RecipeError
from diffusion.recipe.techniques import Methods, Routing
from diffusion.training.machine import compile_network
from tests.families.test_prx import inputs, random_network

FAMILY, NAMED = family_of('tiny-prx'), find_network('tiny-prx')
SETTINGS = Routing(first_block=0, last_block=1, keep=0.4)
KEY = by_id(torch.tensor([7, 8, 9]))


def routed(settings=SETTINGS, network=None):
    network = network if network is not None else random_network()
    found = attach_methods(Methods(routing=settings), FAMILY, NAMED.config, network, 1.0, lambda *_: None, seed=3)
    found['routing'].begin({'sample_key': KEY})
    return network


def call(network):
    noisy, t, text, mask = inputs()
    return network(noisy, t, text, attention_mask=mask, return_dict=False)[0]


def by_hand(network, kept, first, last):
    """One sample after the other; tokens in a list."""
    noisy, t, text, mask = inputs()
    results = []
    for i in range(len(noisy)):
        tokens = network.img_in(img2seq(noisy[i : i + 1], 2))
        place = network.pe_embedder(get_image_ids(1, 8, 8, patch_size=2, device=noisy.device))
        time = network._compute_timestep_embedding(t[i : i + 1], torch.float32)
        words = network.txt_in(text[i : i + 1])
        for number, block in enumerate(network.blocks):
            stay = kept[i].tolist() if first <= number <= last else list(range(tokens.shape[1]))
            out = block(tokens[:, stay], words, time, place[:, :, stay], mask[i : i + 1])
            tokens = torch.stack([out[0, stay.index(j)] if j in stay else tokens[0, j] for j in range(tokens.shape[1])])[None]
        results.append(seq2img(network.final_layer(tokens, time), 2, noisy[i : i + 1].shape))
    return torch.cat(results)


def test_no_token_twice_none_missing_and_all_alike():
    key = by_id(torch.arange(4000))
    kept = kept_tokens(5, key, 16, 0.4)
    assert kept.shape == (4000, math.ceil(0.4 * 16))
    assert all(len(set(row)) == 7 and row == sorted(row) and row[0] >= 0 and row[-1] < 16 for row in kept.tolist())
    share = torch.bincount(kept.flatten(), minlength=16) / 4000
    assert (share - 7 / 16).abs().max() < 5 * (7 / 16 * 9 / 16 / 4000) ** 0.5
    assert torch.equal(kept_tokens(5, key[1:3], 16, 0.4), kept[1:3])  # whatever else is in the batch
    assert not torch.equal(kept_tokens(6, key, 16, 0.4), kept)
    other_epoch = key + torch.tensor([1, 0, 0])
    assert not torch.equal(kept_tokens(5, other_epoch, 16, 0.4), kept)


@pytest.mark.parametrize(('first', 'last'), [(0, 1), (0, 0), (1, 1)])
def test_tokens_that_skip_come_back_where_they_were(first, last):
    kept = kept_tokens(3, KEY, 16, 0.4)
    ours = call(routed(Routing(first, last, 0.4)))
    torch.testing.assert_close(ours, by_hand(random_network(), kept, first, last), rtol=0, atol=1e-5)
    assert (ours - call(random_network())).abs().max() > 1e-3


def test_gradients_are_those_of_the_same_by_hand():
    network, plain = routed(), random_network()
    call(network).square().sum().backward()
    by_hand(plain, kept_tokens(3, KEY, 16, 0.4), 0, 1).square().sum().backward()
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_without_gradients_all_tokens_pass():
    with torch.no_grad():
        assert torch.equal(call(routed()), call(random_network()))


def test_checkpointed_activations_have_the_same_gradients():
    once, again = routed(), random_network()
    FAMILY.checkpoint_activations(again)
    routed(network=again).train()
    for network in (once, again):
        call(network).square().sum().backward()
    for ours, theirs in zip(once.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize('mode', ['network', 'blocks'])
def test_compiles_without_a_break(mode, monkeypatch):
    monkeypatch.setattr('diffusion.training.machine.BACKEND', 'aot_eager')
    torch._dynamo.reset()
    network = routed()
    compile_network(network, mode, FAMILY.blocks)
    torch.testing.assert_close(call(network), call(routed()), rtol=0, atol=1e-5)
    torch._dynamo.reset()


def test_flop_are_those_of_the_tokens_that_stay():
    with torch.device('meta'):
        network = FAMILY.build(NAMED.config)

        def of_a_block(tokens):
            arguments = torch.zeros(1, tokens, 32, requires_grad=True), torch.zeros(1, 16, 32), torch.zeros(1, 32), torch.zeros(1, 1, tokens, 8, 2, 2)
            with FlopCounterMode(display=False) as counter:
                network.blocks[0](*arguments, torch.ones(1, 16, dtype=torch.bool)).sum().backward()
            return counter.get_total_flops()

        whole, saved = of_a_block(16), of_a_block(16) - of_a_block(8)
    plain = training_flops('tiny-prx', (8, 8), 16)
    assert saved > 0.3 * whole
    assert plain - training_flops('tiny-prx', (8, 8), 16, None, Methods(Routing(0, 1, 0.5))) == pytest.approx(2 * saved, rel=0.01)
    assert plain - training_flops('tiny-prx', (8, 8), 16, None, Methods(Routing(1, 1, 0.5))) == pytest.approx(saved, rel=0.01)


def test_a_block_that_is_not_there_is_refused():
    with pytest.raises(RecipeError, match=r'methods\.routing\.last_block: there is no block 2; the network has 2, counted from 0'):
        routed(Routing(0, 2, 0.5))
