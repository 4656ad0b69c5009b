"""A bill for a person: the only place where its numbers are rounded."""

from __future__ import annotations

from collections.abc import Sequence

from diffusion.common.tables import markdown_table
from diffusion.cost.bill import Bill
from diffusion.cost.comparisons import EncodingChoice, PlanOutcome
from diffusion.cost.formulas import ONLINE_FACTOR, Number, days
from diffusion.cost.uncertain import is_uncertain, median, quantiles, spread_text

PEOPLE_SHARE = 0.5  # of a bill, above which it is said


def dollars_text(amount: Number) -> str:
    """`$1,234`, below ten dollars with cents."""
    value = median(amount)
    return f'${value:,.2f}' if 0 < value < 10 else f'${value:,.0f}'


def bill_table(bill: Bill) -> str:
    """Every line, the total last. Medians do not add up: the total's p50 is that of the sums."""
    uncertain = any(is_uncertain(line.dollars) for line in bill.lines)
    rows = []
    for line, share in zip(bill.lines, bill.shares(), strict=True):
        rows.append((line.name, spread_text(median(line.quantity)), line.unit, line.price.amount, *_amounts(line.dollars, uncertain), f'{share:.1%}'))
    rows.append(('total', '', '', '', *_amounts(bill.dollars, uncertain), '100.0%'))
    return markdown_table(('what', 'quantity', 'unit:', 'unit price', *_spread(uncertain), 'share'), rows)


def groups_table(bill: Bill) -> str:
    """The sums of lines that belong together, whose percentiles are not the sums of theirs."""
    uncertain = any(is_uncertain(line.dollars) for line in bill.lines)
    shares = dict.fromkeys(bill.groups, 0.0)
    for line, share in zip(bill.lines, bill.shares(), strict=True):
        shares[line.group] += share
    rows = [(group, *_amounts(bill.of(group), uncertain), f'{share:.1%}') for group, share in shares.items()]
    return markdown_table(('part', *_spread(uncertain), 'share'), rows)


def _spread(uncertain: bool) -> tuple[str, ...]:
    return ('p10', 'p50', 'p90') if uncertain else ('dollars',)


def _amounts(amount: Number, uncertain: bool) -> tuple[str, ...]:
    return tuple(dollars_text(value) for value in quantiles(amount)) if uncertain else (dollars_text(amount),)


def people_text(bill: Bill) -> str:
    """A warning where people's work, which is assumed for a whole project, is most of the bill; empty elsewhere."""
    share = sum(share for line, share in zip(bill.lines, bill.shares(), strict=True) if line.group == 'people')
    if share <= PEOPLE_SHARE:
        return ''
    return (
        f'people are {share:.1%} of this bill, by an assumption that is made for a whole project (work.person_months); the rest is '
        f'{dollars_text(bill.dollars - bill.of("people"))}. Leave them out with --assume work.person_months=0, or say how long it takes you'
    )


def bill_formulas(bill: Bill) -> list[str]:
    """How each quantity came about."""
    return [f'{line.name}: {line.formula}' for line in bill.lines]


def bill_prices(bill: Bill) -> list[str]:
    """Each price once, with its name, source and date."""
    return list(dict.fromkeys(str(line.price) for line in bill.lines))


def plans_table(outcomes: Sequence[PlanOutcome], deadline_days: float | None = None) -> str:
    """Training alone, by plan, with the probability of a deadline if there is one; what has no numbers says why below.

    A reservation that is longer than the run is marked: most of its price is not for this run.
    """
    rows = [
        (
            f'{outcome.price.name}{" (*)" if outcome.mostly_unused else ""}',
            outcome.price.amount,
            None if outcome.problem else spread_text(days(outcome.wall_hours), 2),
            None if outcome.problem else dollars_text(outcome.dollars),
            *(() if deadline_days is None else (None if outcome.probability is None else f'{outcome.probability:.0%}',)),
            outcome.price.date,
        )
        for outcome in outcomes
    ]
    problems = [f'{outcome.price.name}: {outcome.problem}' for outcome in outcomes if outcome.problem]
    problems += [
        f'(*) {outcome.price.name}: reserved for {days(outcome.reserved_hours):,.0f} days, and the run takes '
        f'{spread_text(days(outcome.wall_hours), 2)}: the dollars are those of the whole reservation'
        for outcome in outcomes
        if outcome.mostly_unused
    ]
    deadline = () if deadline_days is None else (f'in {deadline_days:g} days',)
    return '\n'.join([markdown_table(('plan', 'per GPU-hour', 'days', 'dollars', *deadline, 'price of'), rows), *problems])


def choice_text(choice: EncodingChoice) -> str:
    """Latents, in every step, or beside training: the steps on latents only, in one line."""
    parts = f'{dollars_text(choice.training)} of steps + {dollars_text(choice.encoding)} of encoding + {dollars_text(choice.latents)} of storage'
    online = f'{dollars_text(choice.online)} ({ONLINE_FACTOR:g} times the steps)'
    fleet = ' and '.join(f'{spread_text(one.num_encoders)} at {one.encoder.amount} ({one.phase})' for one in choice.encoders)
    beside = f'beside the steps on GPUs that keep up with them, {fleet}: {dollars_text(choice.beside)}'
    return f'latents: {parts} = {dollars_text(choice.precomputed)}; encoding in every step instead: {online}; {beside}'
