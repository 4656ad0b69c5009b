"""Reconstructions for people: a table for the terminal, the page, and the sheet of originals, reconstructions and differences."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from diffusion.common.files import replacing
from diffusion.common.images import LARGEST_PX, InlineImage, save_png, to_inline, to_pil
from diffusion.common.pages import write_page as render
from diffusion.common.text import brief, counted, leaves, markdown_table
from diffusion.evaluation.job.reconstructing import PAGE_NAME, SHEET_NAME, Shown
from diffusion.evaluation.job.results import AutoencoderRecord, Reconstructions, with_error
from diffusion.evaluation.pages.comparing import Measure, flat, measure_of

GAIN = 4  # of differences, as they are shown: a level of 64 is white
CELL_PX = 128  # to which smaller images are enlarged on the sheet, by a whole factor
LABEL_PX, GAP_PX = 18, 2
MOST_IMAGES = 72  # of the page: 10 MB if they are as hard to compress as noise
TEXT_LIMIT = 200  # letters of a caption


def reconstruction_table(result: Reconstructions) -> str:
    """Return a line for each autoencoder, and what its figures depend on."""
    measures = _measures(result)
    header = ['autoencoder', 'latents:', *(f'{one.title} {one.arrow}' for one in measures), 'mean', 'std', 'images/s']
    rows = [
        [
            one['name'],
            _shape(one),
            *(text for text, _ in _cells(result, one)),
            *(f'{value:.3f}' for value in _scaled(one)),
            f'{one["images_per_sec"]:.3g}',
        ]
        for one in result['autoencoders']
    ]
    any_tied = any(ranking['tied'] for ranking in result['standings'].values())
    return '\n'.join(
        [
            f'{counted(result["real"]["count"], "image")} of {result["protocol"]["resolution"]} px of {result["real"]["where"]}',
            *_dropped(result),
            '',
            markdown_table(header, rows),
            '',
            f'± is one standard error{"; ≈: the difference to the best may be chance" if any_tied else ""}; '
            f'mean and std are of the latents after scale and shift; protocol {result["digest"]}',
        ]
    )


def write_reconstructions(result: Reconstructions, shown: Sequence[Shown], out: Path) -> None:
    """Write the sheet and the page into OUT."""
    with replacing(out / SHEET_NAME) as temporary:
        save_png(sheet(result, shown), temporary, {'protocol': result['digest'], 'images': ', '.join(one.key for one in shown)})
    autoencoders, measures = result['autoencoders'], _measures(result)
    several = len(autoencoders) > 1
    made_here = [one.title for one in measures if one.key.endswith('@random-conv')]
    notes = [
        *_dropped(result),
        *(f'{one["name"]}: {line}' for one in autoencoders for line in one['warnings']),
        *([f'{", ".join(made_here)}: of random convolutions, no published network; compare with each other only.'] if made_here else []),
    ]
    first = [(one.title, autoencoders[0]['metrics'][one.key]['value']) for one in measures]
    render(
        out / PAGE_NAME,
        'reconstruction.html',
        title=f'{autoencoders[0]["name"]}: reconstruction' if not several else f'Reconstructions of {len(autoencoders)} autoencoders',
        result=result,
        several=several,
        numbers=[(title, f'{value:#.3g}'.rstrip('.')) for title, value in first] if not several else [],
        notes=notes,
        measures=measures,
        rows=[(one['name'], _shape(one), _cells(result, one)) for one in autoencoders],
        latents=[(one, _latent_rows(one)) for one in autoencoders],
        gain=GAIN,
        sheets=[
            (replace(one, caption=one.caption if len(one.caption) <= TEXT_LIMIT else f'{one.caption[:TEXT_LIMIT]} …'), _inline(result, one))
            for one in shown[: max(2, MOST_IMAGES // (1 + 2 * len(autoencoders)))]
        ],
        num_shown=len(shown),
        ranked_by=next((one.title for one in measures if one.kind in ('psnr', 'ssim', 'lpips')), ''),
        protocol=leaves(flat(result['protocol'])),
        line=_one_line(result),
        about=[(one['name'], _facts(one)) for one in autoencoders],
        environment=[(name.replace('_', ' '), value) for name, value in leaves(result['environment'])],
    )


def sheet(result: Reconstructions, shown: Sequence[Shown]) -> Image.Image:
    """Return rows with a label above each: the originals, and of each autoencoder its reconstructions and absolute differences times GAIN."""
    rows = [('originals', [one.original for one in shown])]
    for number, record in enumerate(result['autoencoders']):
        rows.append((record['name'], [one.reconstructions[number] for one in shown]))
        rows.append((f'{record["name"]}: {GAIN} x absolute difference', [difference(one, number) for one in shown]))
    side = shown[0].original.shape[-1]
    side *= max(1, CELL_PX // side)
    canvas = Image.new('RGB', (len(shown) * (side + GAP_PX) - GAP_PX, len(rows) * (LABEL_PX + side + GAP_PX)), 'white')
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=12)
    for place, (label, images) in enumerate(rows):
        top = place * (LABEL_PX + side + GAP_PX)
        pen.text((2, top + 2), label, fill='black', font=font)
        for column, image in enumerate(images):
            canvas.paste(to_pil(image).resize((side, side), Image.Resampling.NEAREST), (column * (side + GAP_PX), top + LABEL_PX))
    return canvas


def difference(one: Shown, number: int) -> Tensor:
    """Return (3, R, R) uint8: GAIN x |reconstruction - original|, cut off at white."""
    levels = (one.reconstructions[number].int() - one.original.int()).abs() * GAIN
    return levels.clamp(max=255).to(torch.uint8)


def _measures(result: Reconstructions) -> list[Measure]:
    return [measure_of(name, value, of_reconstructions=True) for name, value in result['autoencoders'][0]['metrics'].items()]


def _cells(result: Reconstructions, one: AutoencoderRecord) -> list[tuple[str, str]]:
    """(text, `best`, `tied` or nothing) of each metric."""
    cells = []
    for name, value in one['metrics'].items():
        ranking = result['standings'].get(name)
        mark = '' if ranking is None else 'best' if one['name'] == ranking['best'] else 'tied' if one['name'] in ranking['tied'] else ''
        cells.append((f'{"≈ " if mark == "tied" else ""}{with_error(value["value"], value["error"])}', mark))
    return cells


def _shape(one: AutoencoderRecord) -> str:
    """`f8 c4`: pixels per latent along a side, channels."""
    return f'f{one["downsampling"]} c{one["latent_channels"]}'


def _scaled(one: AutoencoderRecord) -> tuple[float, float]:
    """Mean and deviation of the latents after the configured scale and shift."""
    return (one['latents']['mean'] - one['shift_factor']) * one['scaling_factor'], one['latents']['std'] * one['scaling_factor']


def _dropped(result: Reconstructions) -> list[str]:
    """Sentences about images that are not in the figures, or should not be."""
    found = [f'Not among the images: {result["real"]["left_out"]}.'] if result['real']['left_out'] else []
    if result['enlarged']:
        enlarged, side = counted(result['enlarged'], 'image'), result['protocol']['resolution']
        are = 'is' if result['enlarged'] == 1 else 'are'
        found.append(f'{enlarged} {are} smaller than {side} px and enlarged: the figures are too good; set --resolution lower.')
    return found


def _one_line(result: Reconstructions) -> str:
    """The protocol in a sentence, to be copied with a number."""
    protocol = result['protocol']
    features = ', '.join(f'{name} {brief(value)}' for name, value in protocol['extractors'].items())
    return (
        f'{counted(protocol["samples"], "image")} ({brief(protocol["real"]["identity"])}, {protocol["real"]["chosen"]}, seed {protocol["seed"]}) of '
        f'{protocol["resolution"]} px, {protocol["resize"]}; {protocol["latents"]}, {protocol["precision"]}, 8-bit images; '
        f'{f"features: {features}; " if features else ""}protocol {result["digest"]}'
    )


def _latent_rows(one: AutoencoderRecord) -> list[list[str]]:
    """Unscaled, then scaled: all channels, and each."""
    scale, shift, latents = one['scaling_factor'], one['shift_factor'], one['latents']
    rows = [['all', f'{latents["mean"]:.4g}', f'{latents["std"]:.4g}', '', *(f'{value:.3f}' for value in _scaled(one))]]
    for number, channel in enumerate(latents['channels']):
        mean, std, noise = channel['mean'], channel['std'], channel['posterior_std']
        rows.append([str(number), f'{mean:.4g}', f'{std:.4g}', f'{noise:.2g}', f'{(mean - shift) * scale:.3f}', f'{std * scale:.3f}'])
    return rows


def _inline(result: Reconstructions, one: Shown) -> list[InlineImage]:
    images = [(one.original, 'original')]
    for number, record in enumerate(result['autoencoders']):
        images += [(one.reconstructions[number], record['name']), (difference(one, number), f'{GAIN} × difference')]
    return [to_inline(to_pil(image), caption, LARGEST_PX) for image, caption in images]


def _facts(one: AutoencoderRecord) -> list[tuple[str, str]]:
    return [
        ('folder', one['where']),
        ('SHA-256 of its weights', one['sha256']),
        ('parameters', f'{one["num_parameters"]:,}'),
        ('latents', f'{_shape(one)}: {3 * one["downsampling"] ** 2 / one["latent_channels"]:.3g} values of an image for each latent'),
        ('scaling_factor, shift_factor', f'{one["scaling_factor"]:g}, {one["shift_factor"]:g}'),
        ('speed', f'{one["images_per_sec"]:.3g} images/s encoded and decoded in float32'),
    ]
