"""Work that one rank does for all: they get its result or its error. If it raised alone, the others would wait until they time out."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar('Result')


@dataclass
class _Outcome:
    """The result of work, or the error that it raised; what another rank gets has the error as `portable` makes it."""

    result: Any = None
    error: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Outcome, (self.result, None if self.error is None else portable(self.error))


def _dist() -> Any:
    from composer.utils import dist  # brings torch, which commands that plan and check do without

    return dist


def unwrap_model(state: Any) -> Any:
    """Return the model of a Composer State without the wrapper of DDP."""
    return getattr(state.model, 'module', state.model)


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Run `work` on the first rank and return its result on all ranks. The others wait; all must call this.

    Raises:
        Exception: what `work` raises on the first rank, on all ranks. Where it cannot be pickled, RuntimeError with its text on the others.
    """
    dist = _dist()
    outcomes = [_attempt(work) if dist.get_global_rank() == 0 else None]
    dist.broadcast_object_list(outcomes, src=0)
    return _result_of(outcomes, 0)


def on_first_rank_of_node(work: Callable[[], Result]) -> Result:
    """Run `work` on the first rank of each node and return its result on all ranks of that node. All ranks of all nodes must call this.

    Raises:
        Exception: as `on_first_rank`, if it fails on any node: what the first of them raises.
    """
    dist = _dist()
    own, rank = _attempt(work) if dist.get_local_rank() == 0 else None, dist.get_global_rank()
    outcomes = dist.all_gather_object(own)
    outcomes[rank] = own  # not a copy: an error of our own has its traceback
    return _result_of(outcomes, rank - dist.get_local_rank())


def on_every_rank(work: Callable[[], Result]) -> Result:
    """Run `work` on each rank and return the rank's own result, if it succeeds on all. All ranks must call this.

    Raises:
        Exception: as `on_first_rank`, if it fails on any rank: what the first of them raises.
    """
    dist = _dist()
    own, rank = _attempt(work), dist.get_global_rank()
    failed = dist.all_gather_object(_Outcome(error=own.error))
    failed[rank] = own
    return _result_of(failed, rank)


def _attempt(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(result=work())
    except Exception as error:
        return _Outcome(error=error)


def _result_of(outcomes: list[_Outcome | None], wanted: int) -> Any:
    for rank, outcome in enumerate(outcomes):
        if outcome is not None and outcome.error is not None:
            if rank != _dist().get_global_rank():
                outcome.error.add_note(f'(raised on rank {rank})')
            raise outcome.error
    own = outcomes[wanted]
    assert own is not None
    return own.result


def portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its message if pickle could not restore the same error on another rank."""
    try:
        pickle.dumps(error)
        if str(copy.copy(error)) == str(error):
            return error
    except Exception as reason:  # its constructor's, or that of what it carries
        return RuntimeError(f'{type(error).__name__}: {error} (it cannot be pickled: {reason})')
    return RuntimeError(f'{type(error).__name__}: {error}')
