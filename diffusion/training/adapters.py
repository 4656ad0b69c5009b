"""What the optimizer gets, of a network or of an adapter, and what the checkpoints of an adapter leave out."""

from typing import Any

from torch import Tensor, nn

from diffusion.families.adapters import trained_weights
from diffusion.recipe import Recipe


def parameter_groups(recipe: Recipe, model: Any) -> list[dict[str, Any]]:
    """What the optimizer trains: the network (for Muon its matrices first), what methods add, and the adapters of text encoders with a rate and a
    weight decay of their own."""
    settings, adapter = recipe.optimizer, recipe.adapter
    weights = list(trained_weights(model.network).values())
    network = {'params': weights, 'lr': settings.lr, 'weight_decay': settings.weight_decay}
    groups = [network]
    if settings.muon is not None:
        matrices: dict[Tensor, int] = model.family.matrices(model.network)
        by_stack = {number: [weight for weight, stacked in matrices.items() if stacked == number] for number in sorted(set(matrices.values()))}
        others = [weight for weight in weights if weight not in matrices]
        groups = [*({**network, 'params': params, 'stacked': number} for number, params in by_stack.items()), {**network, 'params': others}]
    added = [weight for method in model.methods.values() for weight in method.parameters()]
    if added:
        groups.append({'params': added, 'lr': settings.lr, 'weight_decay': 0.0})  # what they have to be is nowhere near zero
    if adapter is not None and adapter.text_encoders:
        decay = settings.weight_decay if adapter.text_weight_decay is None else adapter.text_weight_decay
        groups.append({'params': list(trained_weights(model.text_encoders).values()), 'lr': adapter.text_lr, 'weight_decay': decay})
    return groups


def leave_out_frozen(model: nn.Module) -> None:
    """Let the state of a model hold what is trained alone: to save and, strictly, to load."""

    def keep_trained(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        trained = {f'{prefix}{name}' for name in trained_weights(module)}
        for name in [name for name in state if name.startswith(prefix) and name not in trained]:
            del state[name]

    def expect_trained(module: nn.Module, keys: Any) -> None:
        trained = tuple(trained_weights(module))
        keys.missing_keys[:] = [name for name in keys.missing_keys if name.endswith(trained)]  # wrappers put their names in front

    model.register_state_dict_post_hook(keep_trained)
    model.register_load_state_dict_post_hook(expect_trained)
