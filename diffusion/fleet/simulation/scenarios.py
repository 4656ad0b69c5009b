"""Rows of the table of policies: which ones a fleet needs, one more a row, then the same under worse conditions."""

from dataclasses import replace

from diffusion.fleet.simulation.results import FleetOutcome, mean_outcome, outcome_of
from diffusion.fleet.simulation.settings import FleetSettings
from diffusion.fleet.simulation.simulation import simulate


def scenarios(settings: FleetSettings, times: float = 10.0, checkpoint_steps: int = 20) -> dict[str, FleetSettings]:
    """ServiceSettings by what they are called.

    Args:
        times: interruptions of the last rows, of those of `settings`.
        checkpoint_steps: of the row with more frequent checkpoints.
    """
    none = replace(settings, has_bans=False, has_quarantine=False, has_slow=False, has_blame=False)
    moved = replace(settings, has_blame=False)
    often = replace(moved, interruptions_per_hour=settings.interruptions_per_hour * times)
    return {
        f'no bans, {settings.max_attempts} attempts': none,
        'ban (job, machine) only': replace(none, has_bans=True),
        '+ machine out after 3 failures': replace(moved, has_slow=False),
        '+ slow machines (2x median) moved': moved,
        'same, lease 15 min': replace(moved, lease_min=15.0),
        f'same, interruptions x{times:g} ({often.interruptions_per_hour:.3g}/h)': often,
        f'same, checkpoint each {checkpoint_steps} steps': replace(often, checkpoint_steps=checkpoint_steps),
        f'x{times:g} with blame: the policies of the service': replace(often, has_blame=True),
    }


def simulate_seeds(settings: FleetSettings, seeds: range) -> FleetOutcome:
    """Mean over runs, one a seed."""
    return mean_outcome([outcome_of(simulate(settings, seed)) for seed in seeds])
