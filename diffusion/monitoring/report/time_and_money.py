"""Where a run's time and money went."""

from markupsafe import Markup

from diffusion.common.pages import LIGHT, new_figure, page_style, svg
from diffusion.common.text import counted
from diffusion.cost.encoders import NO_PRICE
from diffusion.cost.formulas import HOURS_PER_DAY, SD2_BASE
from diffusion.cost.published import ANYSCALE, MOSAICML_TWO_PHASE
from diffusion.monitoring.report.run import Run, format_value
from diffusion.recipe.averaging import coverage
from diffusion.recipe.schema import Ema

# Told apart without colour, and neighbours in the bar by their hatches too: (colour of the palette, hatch).
TEXTURES = {
    'compute': ('series1', ''), 'recompute': ('bad', 'xxx'), 'start': ('panel', '///'), 'data wait': ('page', '...'), 'save': ('series3', ''),
    'upload': ('series5', '+++'),
    'evaluation': ('series2', '---'), 'sampling': ('series4', '|||'), 'stopped': ('page', ''), 'other': ('faint', ''),
}  # fmt: skip


def facts(run: Run) -> list[tuple[str, str]]:
    last, price = run.last, run.price
    return [
        ('device', run.device),
        ('samples seen', f'{run.samples_seen:,.0f}'),
        ('the average (EMA) covers', str(coverage(Ema(**run.recipe['ema']), int(last.get('batch', 0))) or 'nothing yet')),
        ('images/s per GPU', format_value(last.get('throughput/images_per_sec_per_gpu'), '{:,.1f}')),
        ('MFU', format_value(last.get('throughput/mfu'), '{:.1%}')),
        ('peak memory', format_value(last.get('throughput/peak_memory_gb'), '{:.2f} GB')),
        ('waiting for data', format_value(last.get('throughput/data_wait_share'), '{:.1%}')),
        ('training, wall time', format_value(last.get('time/elapsed_hours'), '{:.3f} h')),
        ('to go', format_value(last.get('time/remaining_hours'), '{:.3f} h')),
        ('price', str(price) if price is not None else 'not known'),
        ('spent', format_value(last.get('cost/dollars_so_far'), '${:,.4f}')),
        *encoder_facts(run),
        ('to spend', format_value(last.get('cost/dollars_to_go'), '${:,.4f}')),
    ]


def encoder_facts(run: Run) -> list[tuple[str, str]]:
    """Hours and dollars of the machines that encode next to training; nothing without them."""
    bill = run.encoders
    if bill is None:
        return []
    of_them = 'encoders (data.encoders)'
    hours = f'{counted(bill.num_encoders, "encoder")} x {bill.wall_hours:,.3f} h in which training ran'
    if bill.dollars is None:
        return [(of_them, hours), ('spent on encoders', f'not included: their price is not known; {NO_PRICE}')]
    spent = f'${bill.dollars:,.4f} at {bill.price}' + (f' x {bill.units:g}' if bill.units != 1 else '')
    return [(of_them, hours), ('spent on encoders', spent), ('spent with encoders', format_value(run.dollars, '${:,.4f}'))]


def time_bar(run: Run) -> Markup:
    """Shares of the wall time, as one bar."""
    accounts = run.accounts
    with page_style():
        figure = new_figure(8.6, 1.5)
        axis = figure.subplots()
        left = 0.0
        for name, (colour, hatch) in TEXTURES.items():
            share = 100 * accounts.sec[name] / accounts.wall_sec
            if share >= 0.05:
                label = f'{name} {share:.1f} %'
                axis.barh(0, share, left=left, color=LIGHT[colour], hatch=hatch, edgecolor=LIGHT['ink'], linewidth=0.8, label=label)
            left += share
        axis.set_xlim(0, 100)
        axis.set_yticks([])
        axis.set_xlabel('% of the wall time')
        axis.spines['left'].set_visible(False)
        figure.legend(loc='outside upper left', ncols=5, handlelength=2.5, handleheight=1.3)
        return svg(figure, 'where the time went')


def sd2_rows() -> list[tuple[str, ...]]:
    """What the demo's recipe would be at the size of Stable Diffusion 2 base: GPUs, images/s at 256 and 512 px, days, price, dollars, source."""
    return [
        (
            f'{row.num_gpus} x {row.gpu}',
            f'{row.images_per_sec[256]:,.0f}',
            f'{row.images_per_sec[512]:,.0f}',
            f'{row.hours(SD2_BASE) / HOURS_PER_DAY:,.2f}',
            f'${row.price_per_gpu_hour:.2f}',
            f'${row.dollars(SD2_BASE):,.0f}',
            row.source,
        )
        for row in (*MOSAICML_TWO_PHASE, ANYSCALE)
    ]


def sd2_samples() -> str:
    return ' and '.join(f'{phase.num_samples / 1e9:.2f} billion samples at {phase.resolution} px' for phase in SD2_BASE)
