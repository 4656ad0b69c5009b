"""The page of `diffusion.check --preview`: each photo as training sees it, cut and masked, with its captions; before a GPU is rented."""

import io
from collections import Counter
from pathlib import Path

from PIL import Image

from diffusion.common.pages import data_uri, write_page
from diffusion.common.text import counted
from diffusion.datasets.transforms import cover, covered
from diffusion.finetuning.photos import Photo, read_photos
from diffusion.recipe import Recipe
from diffusion.recipe.schema import streams_of

MUCH_CUT_OFF = 0.25  # of a photo, marked: a head may be missing
THUMBNAIL_PX = 384  # longer side
MASKED_OUT = 0.75  # share of white where a mask is black


def write_preview(recipe: Recipe, path: Path) -> str:
    """Write the page of all photos that a recipe names, whole or not at all; return what it shows in words, '' without photos.

    Raises:
        DataError: photos cannot be used.
    """
    named = {key: stream.photos for key, stream in streams_of(recipe).items() if stream.photos}
    found = {key: [*read_photos(photos, recipe.data, f'{key}.photos')] for key, photos in named.items()}
    if not found:
        return ''
    photos = [photo for its in found.values() for photo in its]
    cut_off = sum(share_cut_off(photo) > MUCH_CUT_OFF for photo in photos)
    sizes = Counter('{} x {}'.format(*photo.train_px) for photo in photos)
    write_page(
        path,
        'photos.html',
        title=f'{recipe.name}: photos',
        name=recipe.name,
        numbers=[
            ('photos', f'{len(photos):,}'),
            ('with a mask', f'{sum(photo.mask is not None for photo in photos):,}'),
            ('much cut off', f'{cut_off:,}'),
            ('captions', f'{len({caption for photo in photos for caption, _ in photo.captions}):,}'),
        ],
        cut_off=cut_off,
        buckets=recipe.data.aspect_buckets,
        sizes=[(f'{size} px', f'{count:,}') for size, count in sizes.most_common()],
        streams=[(key, named[key].loss_outside, [*map(_card, its)]) for key, its in found.items()],
    )
    return f'{counted(len(photos), "photo")}, {cut_off} with more than {MUCH_CUT_OFF:.0%} cut off'


def share_cut_off(photo: Photo) -> float:
    """Return the share of a photo's area that is outside what training sees."""
    (width, height), (train_width, train_height) = photo.size_px, photo.train_px
    ratio = width / height * train_height / train_width
    return 1 - min(ratio, 1 / ratio)


def _card(photo: Photo) -> tuple[str, list[tuple[str, float]], str, str, bool]:
    """The photo as it is trained on, pale outside its mask, its captions, its path, its sizes and mask in words, and whether much is cut off."""
    (width, height), (train_width, train_height), cut_off = photo.size_px, photo.train_px, share_cut_off(photo)
    text = f'{width} x {height} px to {train_width} x {train_height}, {cut_off:.0%} cut off'
    image = Image.fromarray(covered(photo.content, *photo.train_px)[0].permute(1, 2, 0).numpy())
    if photo.mask is not None:
        inside = cover(photo.mask.convert('RGB'), *photo.train_px)[0]
        text += f'; mask: {inside.float().mean() / 255:.0%}'
        pale = Image.blend(image.convert('L').convert('RGB'), Image.new('RGB', image.size, 'white'), MASKED_OUT)
        image = Image.composite(image, pale, Image.fromarray(inside.numpy()))
    image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    content = io.BytesIO()
    image.save(content, 'JPEG', quality=88)
    return data_uri(content.getvalue(), 'image/jpeg'), photo.captions, photo.key, text, cut_off > MUCH_CUT_OFF
