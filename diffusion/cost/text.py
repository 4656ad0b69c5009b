"""A plan as a person reads it. Nothing is rounded before it is written here; tables fit 120 columns, other lines are wrapped there."""

import textwrap
from collections.abc import Sequence

from diffusion.common.text import counted, markdown_table
from diffusion.cost.bill import Bill
from diffusion.cost.encoders import IN_STEP, OFFLINE, ONLINE
from diffusion.cost.formulas import HOURS_PER_DAY, Number, is_uncertain, median, quantiles, spread_text, two_digits
from diffusion.cost.prices import CostRow
from diffusion.cost.project import ProjectPlan

WIDTH = 120
CENT = 0.01  # dollars
PEOPLE_SHARE = 0.5  # of a bill, above which it is printed


def plan_text(plan: ProjectPlan) -> str:
    """Write the whole page: each recipe, the tables over GPUs, the bill, the ways to pay."""
    cluster, bill = plan.cluster, plan.bill
    on_gpus, recipes = f'on {counted(cluster.num_gpus, "GPU")}', [row for row in plan.rows if row.what == 'resolution']
    parts = [
        f'# Plan: {", then ".join(row.recipe for row in recipes)}',
        f'Nothing here was measured by this command. GPU {cluster.gpu}, {cluster.gpus_per_node} a node.',
    ]
    for recipe in recipes:
        own = [row for row in plan.rows if row.recipe == recipe.recipe and row.num_gpus in (None, cluster.num_gpus) and row.formula]
        lines = [f'{"" if row.group == "memory" else row.what:<12}{row.formula}' for row in own if row.group in ('recipe', 'memory')]
        parts += [f'## {recipe.recipe}: {recipe.quantity} px, {recipe.source}', _lines(lines, ' ' * 12)]
    checks = [row.formula for row in plan.rows if row.group == 'memory checked' and row.formula]
    parts += [
        f'## Time and money of the steps alone, at {bill.price}',
        *_counts_tables(plan.rows),
        _lines([*_notes(plan.rows), *checks, *(f'warning: {warning}' for warning in plan.warnings)]),
        f'## The bill {on_gpus}: {spread_text(bill.wall_hours / HOURS_PER_DAY, 2)} days with evaluation, saves, failures and restarts',
        bill_table(bill),
        groups_table(bill),
        _lines(_people(bill)),
        _lines([f'not counted: {text}' for text in plan.not_counted]),
        _lines([f'not in these ranges: {text}' for text in plan.taken_for_certain]),
        _lines(_ways_to_encode(plan.rows)),
        _lines(['By the formulas:', *(f'  {row.what}: {row.formula}' for row in bill.rows)]),
        _lines(['At these prices:', *dict.fromkeys(f'  {row.price}' for row in bill.rows)]),
        f'## Training alone {on_gpus}, by price plan',
        plans_table([row for row in plan.rows if row.group == 'ways to pay']),
    ]
    return '\n\n'.join(part for part in parts if part)


def _lines(texts: Sequence[str], indent: str = '    ') -> str:
    return '\n'.join(textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False) for text in texts)


def _counts_tables(rows: Sequence[CostRow]) -> list[str]:
    """Write a table per recipe, and one of their sum: the steps alone, without encoding, saves and restarts, which the bill adds."""
    found = {(row.recipe, row.num_gpus, row.what): row for row in rows if row.group in ('recipe', 'steps alone')}
    tables = []
    for recipe in dict.fromkeys(row.recipe for row in rows if row.what == 'resolution'):
        cells = []
        for rate in (row for row in rows if row.recipe == recipe and row.what == 'throughput'):
            mfu, micro, hours = (found[recipe, rate.num_gpus, what] for what in ('MFU', 'micro-batch', 'hours'))
            cells.append([
                str(rate.num_gpus),
                f'{rate.quantity:,.0f}' if rate.quantity >= 100 else f'{rate.quantity:,.2f}',
                rate.kind,
                'unknown' if mfu.quantity is None else f'{mfu.quantity:.1%}',
                f'{micro.quantity} {micro.source}'.strip(),
                f'{hours.quantity:,.1f}',
            ])  # fmt: skip
        tables.append(markdown_table(['GPUs', f'images/s, {recipe}', 'from:', 'MFU', 'micro', 'hours'], cells))
    totals = [
        [str(row.num_gpus), f'{found["", row.num_gpus, "days"].quantity:,.2f}', f'{row.quantity:,.0f}', dollars_text(row.dollars)]
        for row in rows
        if (row.group, row.what) == ('steps alone', 'training')
    ]
    return [*tables, markdown_table(['GPUs', 'days', 'GPU-hours', 'dollars'], totals)]


def _notes(rows: Sequence[CostRow]) -> list[str]:
    """Write the reach of predictions, other micro-batches that recipes need, and errors on other numbers of GPUs."""
    where: dict[str, list[str]] = {}  # numbers of GPUs, by note
    notes = []
    for row in rows:
        if row.what == 'throughput' and row.source:
            notes.append((row, f'{row.recipe}: {row.kind}: {row.source}'))
        elif row.group == 'steps alone' and row.formula:
            notes.append((row, f'no plan: {row.formula}' if row.what == 'no plan' else row.formula))
    for row, note in notes:
        where.setdefault(note, []).append(str(row.num_gpus))
    return [f'{", ".join(counts)} GPU{"" if counts == ["1"] else "s"}: {note}' for note, counts in where.items()]


def dollars_text(amount: Number) -> str:
    """Write `$1,234`, below ten dollars with cents; of a range the median with two digits; nothing finer than a cent."""
    value = median(amount)
    if 0 < value < CENT:
        return f'<${CENT:g}'
    if is_uncertain(amount):
        return f'${two_digits(value)}'
    return f'${value:,.2f}' if 0 < value < 10 else f'${value:,.0f}'


def bill_table(bill: Bill) -> str:
    """Write every row, the total last. Medians do not add up: the total's p50 is that of the sums. Rows of less than a cent are one."""
    cells, small = [], []
    for row in bill.rows:
        if 0 < quantiles(row.dollars)[2] < CENT:
            small.append(row)
            continue
        quantity = two_digits(median(row.quantity)) if is_uncertain(row.quantity) else spread_text(row.quantity)
        cells.append((row.what, quantity, row.unit, row.price.amount if row.price else '', *_amounts(bill, row.dollars)))
    if small:
        cells.append((f'{counted(len(small), "line")} below a cent', '', '', '', *_amounts(bill, sum(row.dollars for row in small))))
    cells.append(('total', '', '', '', *_amounts(bill, bill.dollars)))
    return markdown_table(('what', 'quantity', 'unit:', 'unit price', *_titles(bill)), cells)


def groups_table(bill: Bill) -> str:
    """Write the sums of rows that belong together, whose percentiles are not the sums of theirs."""
    return markdown_table(('part', *_titles(bill)), [(group, *_amounts(bill, bill.of(group))) for group in bill.groups])


def _titles(bill: Bill) -> tuple[str, ...]:
    return ('p10', 'p50', 'p90', 'share') if is_uncertain(bill.dollars) else ('dollars', 'share')


def _amounts(bill: Bill, dollars: Number) -> list[str]:
    """Return the cells below `_titles`."""
    texts = (
        [dollars_text(value) if 0 < value < CENT else f'${two_digits(value)}' for value in quantiles(dollars)]
        if is_uncertain(dollars)
        else [dollars_text(dollars)] * (len(_titles(bill)) - 1)
    )
    return [*texts, f'{bill.share(dollars):.1%}']


def _people(bill: Bill) -> list[str]:
    """Warn where people's work, which is assumed for a whole project, is most of the bill."""
    share = bill.share(bill.of('people'))
    if share <= PEOPLE_SHARE:
        return []
    return [
        f'people are {share:.1%} of this bill, by an assumption that is made for a whole project (work.person_months); the rest is '
        f'{dollars_text(bill.dollars - bill.of("people"))}. Leave them out with --assume work.person_months=0, or give your own number'
    ]


def _ways_to_encode(rows: Sequence[CostRow]) -> list[str]:
    """Write the steps with their encoding in one line per way, and from which epoch encoding once is cheaper; nothing without a second way."""
    ways = [row for row in rows if row.group in (OFFLINE, ONLINE, IN_STEP)]
    if not ways or {row.recipe for row in ways if row.group == OFFLINE} != {row.recipe for row in ways}:
        return []
    totals = [f'{way} {dollars_text(sum(row.dollars for row in ways if row.group == way))}' for way in (OFFLINE, ONLINE, IN_STEP)]
    epochs = [f'{row.recipe}: offline is {row.what} from {counted(row.quantity or 0, "epoch")} on' for row in ways if row.unit == 'epochs']
    return [f'steps with encoding, {", ".join(totals)}', *epochs]


def plans_table(rows: Sequence[CostRow]) -> str:
    """Write training alone by price plan; what has no numbers says why below, and so does a reservation that is longer than the run."""
    cells, below = [], list[str]()
    for row in rows:
        price = row.price
        assert price is not None
        mark = ' (*)' if row.formula and row.quantity is not None else ''
        days = None if row.quantity is None else spread_text(row.quantity / HOURS_PER_DAY, 2)
        cells.append((f'{row.what}{mark}', price.amount, days, None if days is None else dollars_text(row.dollars), price.date))
        if row.formula:
            below.append(f'{mark and "(*) "}{row.what}: {row.formula}')
    return '\n'.join([markdown_table(('plan', 'per GPU-hour', 'days', 'dollars', 'price of'), cells), *below])
