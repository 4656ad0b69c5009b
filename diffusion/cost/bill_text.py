"""A bill as a person reads it. Numbers are rounded here and nowhere else: ranges to the two digits that assumptions deserve."""

from __future__ import annotations

from collections.abc import Sequence

from diffusion.common.tables import markdown_table
from diffusion.cost.bill import Bill
from diffusion.cost.comparisons import EncodingChoice, PlanOutcome
from diffusion.cost.formulas import HOURS_PER_DAY, ONLINE_FACTOR, Number
from diffusion.cost.uncertain import is_uncertain, median, quantiles, spread_text, two_digits

PEOPLE_SHARE = 0.5  # of a bill, above which it is printed


def dollars_text(amount: Number) -> str:
    """Write `$1,234`, below ten dollars with cents; of a range the median with two digits."""
    value = median(amount)
    if is_uncertain(amount):
        return f'${two_digits(value)}'
    return f'${value:,.2f}' if 0 < value < 10 else f'${value:,.0f}'


def bill_table(bill: Bill) -> str:
    """Write every line, the total last. Medians do not add up: the total's p50 is that of the sums."""
    head, amounts = _amounts(bill)
    rows = []
    for line, share in zip(bill.lines, bill.shares(), strict=True):
        quantity = two_digits(median(line.quantity)) if is_uncertain(line.quantity) else spread_text(line.quantity)
        rows.append((line.name, quantity, line.price.unit, line.price.amount, *amounts(line.dollars), f'{share:.1%}'))
    rows.append(('total', '', '', '', *amounts(bill.dollars), '100.0%'))
    return markdown_table(('what', 'quantity', 'unit:', 'unit price', *head, 'share'), rows)


def groups_table(bill: Bill) -> str:
    """Write the sums of lines that belong together, whose percentiles are not the sums of theirs."""
    head, amounts = _amounts(bill)
    shares = dict.fromkeys(bill.groups, 0.0)
    for line, share in zip(bill.lines, bill.shares(), strict=True):
        shares[line.group] += share
    return markdown_table(('part', *head, 'share'), [(group, *amounts(bill.of(group)), f'{share:.1%}') for group, share in shares.items()])


def _amounts(bill: Bill):  # type: ignore[no-untyped-def]
    """The titles of the columns of dollars, and what they show of an amount."""
    if not is_uncertain(bill.dollars):
        return ('dollars',), lambda amount: (dollars_text(amount),)
    return ('p10', 'p50', 'p90'), lambda amount: (
        tuple(f'${two_digits(value)}' for value in quantiles(amount)) if is_uncertain(amount) else (dollars_text(amount),) * 3
    )


def people_text(bill: Bill) -> str:
    """Warn where people's work, which is assumed for a whole project, is most of the bill; empty elsewhere."""
    share = sum(share for line, share in zip(bill.lines, bill.shares(), strict=True) if line.group == 'people')
    if share <= PEOPLE_SHARE:
        return ''
    return (
        f'people are {share:.1%} of this bill, by an assumption that is made for a whole project (work.person_months); the rest is '
        f'{dollars_text(bill.dollars - bill.of("people"))}. Leave them out with --assume work.person_months=0, or give your own number'
    )


def bill_formulas(bill: Bill) -> list[str]:
    """Write the formula of each quantity."""
    return [f'{line.name}: {line.formula}' for line in bill.lines]


def bill_prices(bill: Bill) -> list[str]:
    """Write each price once, with its name, source and date."""
    return list(dict.fromkeys(str(line.price) for line in bill.lines))


def plans_table(outcomes: Sequence[PlanOutcome], deadline_days: float | None = None) -> str:
    """Write training alone by plan, with the probability of a deadline if there is one; what has no numbers says why below.

    A reservation that is longer than the run is marked: most of its price is not for this run.
    """
    rows, below = [], list[str]()
    for outcome in outcomes:
        price, days = outcome.price, spread_text(outcome.wall_hours / HOURS_PER_DAY, 2)
        numbers: list[str | None] = [None, None] if outcome.problem else [days, dollars_text(outcome.dollars)]
        if deadline_days is not None:
            numbers.append(None if outcome.probability_by_deadline is None else f'{outcome.probability_by_deadline:.0%}')
        rows.append((f'{price.name}{" (*)" if outcome.is_mostly_unused else ""}', price.amount, *numbers, price.date))
        if outcome.problem:
            below.append(f'{price.name}: {outcome.problem}')
        elif outcome.is_mostly_unused and outcome.reserved_hours is not None:
            reserved = f'reserved for {outcome.reserved_hours / HOURS_PER_DAY:,.0f} days, and the run takes {days}'
            below.append(f'(*) {price.name}: {reserved}: the dollars are those of the whole reservation')
    deadline = () if deadline_days is None else (f'in {deadline_days:g} days',)
    return '\n'.join([markdown_table(('plan', 'per GPU-hour', 'days', 'dollars', *deadline, 'price of'), rows), *below])


def choice_text(choice: EncodingChoice) -> str:
    """Write the dollars of steps on latents, with encoding in every step, and next to training, in one line."""
    parts = f'{dollars_text(choice.training)} of steps + {dollars_text(choice.encoding)} of encoding + {dollars_text(choice.latents)} of storage'
    online = f'{dollars_text(choice.online)} ({ONLINE_FACTOR:g} times the steps)'
    fleet = ' and '.join(f'{spread_text(number)} at {price.amount} ({phase})' for phase, number, price in choice.encoders)
    concurrent = f'next to the steps on GPUs that keep up with them, {fleet}: {dollars_text(choice.concurrent)}'
    return f'latents: {parts} = {dollars_text(choice.precomputed)}; encoding in every step instead: {online}; {concurrent}'
