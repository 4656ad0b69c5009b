"""Settings that exclude each other: a table, which docs/recipe-reference.md prints. Rules that compute something are functions (rules.py).

Training methods and optimizers bring rows of their own (techniques.py).
"""

import re
from typing import Any

from diffusion.recipe.autoencoder import AnyRecipe
from diffusion.recipe.keys import MISSING
from diffusion.recipe.reading import read_yaml
from diffusion.recipe.schema import present
from diffusion.recipe.techniques import known_techniques

# Conditions that hold together, and indented below them the error: the key that it names, why, and what to set; `{key}` stands for a key's value.
# A condition is `key=value`, `key!=value`, `key>value`, `key` (on: neither null, false nor empty) or `!key` (off). None holds for a key of a section
# that is off, nor for one that recipes of this kind do not have: `model` and `autoencoder` tell the two kinds apart.
TABLE = """
model, data.flip, data.kind!=images
    data.flip: works on images, but data.kind is {data.kind}; set it to false (or data.kind=images)
data.aspect_buckets, data.kind=synthetic
    data.aspect_buckets: synthetic latents are squares; set it to false (or data.kind to latents or images)
data.encoders, data.kind!=images
    data.encoders: encode images while training, and data.kind is {data.kind}; set data.encoders=null (or data.kind=images)
data.encoders.ray.send=bytes, data.max_bad_samples>0
    data.encoders.ray.send: bytes are decoded by the encoders, where nothing can replace a bad sample, and data.max_bad_samples is
    {data.max_bad_samples}; set data.encoders.ray.send=pixels or data.max_bad_samples=0
model.diffusion.schedule.zero_terminal_snr, model.diffusion.prediction=epsilon
    model.diffusion.schedule.zero_terminal_snr: the last timestep is pure noise, from which epsilon prediction learns nothing; set
    model.diffusion.prediction=v_prediction
model.diffusion.schedule.zero_terminal_snr, model.diffusion.prediction=sample, model.diffusion.min_snr_gamma
    model.diffusion.min_snr_gamma: with sample prediction and zero_terminal_snr it gives the last timestep, pure noise, the weight 0: it would never
    be trained, and sampling begins there; set model.diffusion.prediction=v_prediction (or model.diffusion.min_snr_gamma=null)
adapter.text_encoders, adapter.text_lr=null
    adapter.text_lr: null with adapter.text_encoders=true; set it, such as 5.0e-6
!adapter.text_encoders, adapter.text_lr!=null
    adapter.text_lr: {adapter.text_lr} with adapter.text_encoders=false; set it to null, or adapter.text_encoders=true
!adapter.text_encoders, adapter.text_weight_decay!=null
    adapter.text_weight_decay: has no effect without adapter.text_encoders; set it to null
adapter, train.sharding!=ddp
    train.sharding: {train.sharding} does not shard adapters, and there is little to shard; set train.sharding=ddp
adapter, train.precision=bf16
    train.precision: bf16 would round what an adapter learns in a step away; set train.precision=amp_bf16
model, train.compile=network, train.sharding!=ddp
    train.compile: network makes one graph of the whole network, but train.sharding={train.sharding} gathers its weights between the blocks; set
    train.compile=blocks
model, train.compile=network, train.precision=bf16
    train.compile: network makes one graph of the whole network, but train.precision=bf16 gathers its weights between the blocks; set
    train.compile=blocks
ema.half_life, ema.sigma_rel
    ema.sigma_rel: {ema.sigma_rel} next to ema.half_life={ema.half_life}; set ema.half_life=null or ema.sigma_rel=[]
ema.sigma_rel, ema.start!=0ba
    ema.start: {ema.start} cuts off the power functions of ema.sigma_rel, which begin with the run; set ema.start=0ba
ema.offload, !ema.half_life, !ema.sigma_rel
    ema.offload: has no effect without an average; set ema.half_life, ema.sigma_rel or ema.offload=false
!eval.every, eval.streams, data.kind!=synthetic
    eval.streams: are never used, eval.every is null; set it, such as eval.every=1000ba
eval.every, !eval.streams, data.kind!=synthetic
    eval.every: {eval.every} without eval.streams; name the data or set eval.every=null
eval.samples.every, !eval.samples.metrics
    eval.samples.metrics: there are none; name some, such as [clip, cmmd, kid], or set eval.samples.every=null
eval.samples.every, data.aspect_buckets
    eval.samples.every: draws squares, and data.aspect_buckets=true evaluates rectangles; set eval.samples.every=null and score the model with python
    -m diffusion.evaluate
!eval.samples.every, eval.samples.stop.metric
    eval.samples.stop.metric: {eval.samples.stop.metric} is never measured, eval.samples.every is null; set it, or eval.samples.stop.metric=null
!eval.samples.stop.metric, eval.samples.stop.patience!=5
    eval.samples.stop.patience: has no effect without eval.samples.stop.metric; set that, or leave it out
log.samples.every, !log.samples.prompts
    log.samples.every: {log.samples.every} without log.samples.prompts; name some or set every to null
log.samples.every, log.samples.guidance>1, data.caption_dropout=0, !load_path, !adapter
    log.samples.guidance: {log.samples.guidance} needs a trained unconditional model, but data.caption_dropout is 0; set data.caption_dropout=0.1 or
    log.samples.guidance=1
eval.samples.every, eval.samples.guidance>1, data.caption_dropout=0, !load_path, !adapter
    eval.samples.guidance: {eval.samples.guidance} needs a trained unconditional model, but data.caption_dropout is 0; set data.caption_dropout=0.1 or
    eval.samples.guidance=1
model, cost.price_per_encoder_hour!=null, !data.encoders
    cost.price_per_encoder_hour: has no effect without data.encoders; set it to null
checkpoint.keep=0
    checkpoint.keep: 0 would leave nothing to resume from; set at least 1, or -1 to keep all
autoencoder.l1=0, autoencoder.l2=0
    autoencoder.l1: with l2 at 0 too no loss compares the pixels; set autoencoder.l1=1
autoencoder.perceptual.weight=0
    autoencoder.perceptual.weight: 0 has no effect and costs its time; set autoencoder.perceptual=null
autoencoder.adversarial.weight=0
    autoencoder.adversarial.weight: 0 has no effect and costs its time; set autoencoder.adversarial=null
autoencoder, train.sharding!=ddp
    train.sharding: {train.sharding} divides weights, of which an autoencoder has little; set train.sharding=ddp
autoencoder, train.precision=bf16
    train.precision: bf16 shards the weights and rounds norms; set train.precision=amp_bf16
autoencoder, train.attention!=auto
    train.attention: {train.attention} may not take the one head of 512 channels that autoencoders have; set train.attention=auto
autoencoder, train.compile
    train.compile: {train.compile} is for networks that denoise; set train.compile=null
autoencoder, log.samples.every, !eval.every
    log.samples.every: grids show images of eval.streams; name some and set eval.every, or set log.samples.every=null
autoencoder, log.samples.every, !eval.streams
    log.samples.every: grids show images of eval.streams; name some and set eval.every, or set log.samples.every=null
"""
CONFLICTS = [(row[1].split(', '), ' '.join(row[2].split())) for row in re.finditer(r'^(\S.*)\n((?: +.*\n)+)', TABLE, re.MULTILINE)]
CONFLICTS += [(row.split(', '), error) for technique in known_techniques() for row, error in technique.conflicts.items()]


def no_conflicts(recipe: AnyRecipe, _: int) -> list[str]:
    """Rule: the conditions of no row hold together."""
    return [
        re.sub(r'\{([\w.]+)\}', lambda found: _written(_value_at(recipe, found[1])), error)
        for conditions, error in CONFLICTS
        if all(_holds(recipe, condition) for condition in conditions)
    ]


def _holds(recipe: AnyRecipe, condition: str) -> bool:
    found = re.fullmatch(r'(!?)([\w.]+)(?:(=|!=|>)(.+))?', condition)
    assert found is not None, condition
    negated, key, operator, text = found.groups()
    value = _value_at(recipe, key)
    if value == MISSING:
        return False
    if operator is None:
        is_on = bool(present(value)) if isinstance(value, dict) else bool(value)
        return is_on != bool(negated)
    expected = read_yaml(text)
    return value > expected if operator == '>' else (value == expected) == (operator == '=')


def _value_at(recipe: Any, key: str) -> Any:
    """Return the value of a key; MISSING if it has none, or its section is off."""
    for name in key.split('.'):
        recipe = getattr(recipe, name, MISSING)
    return recipe


def _written(value: Any) -> str:
    return {None: 'null', True: 'true', False: 'false'}[value] if isinstance(value, bool | None) else str(value)
