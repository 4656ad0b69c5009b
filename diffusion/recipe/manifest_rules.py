"""Rules between a recipe and the manifest of a dataset that it names."""

import math
import re

from diffusion.contracts.manifest import Manifest
from diffusion.recipe.autoencoder import AnyRecipe, AutoencoderData
from diffusion.recipe.schema import Data, Recipe

# What says where an image was cut from, by the kind of the dataset; `crop` of images is made while they are read.
GEOMETRY_COLUMNS = {'latents': ('size', 'crop'), 'images': ('original_height', 'original_width')}
LEAST_BUCKET_AREA = 0.7  # as a share of side x side; the smallest of data_prep.convert have 0.75
BUCKETS_MULTIPLE_PX = 128  # of the PX in its --buckets aspect:PX


def manifest_errors(manifest: Manifest, recipe: AnyRecipe, setting: str, vae_sha256: str | None = None, geometry: bool = False) -> list[str]:
    """List every way in which a dataset does not fit the recipe, each naming the manifest's field and the recipe's.

    Args:
        setting: the override that names the dataset, such as `data.streams.train.local=FOLDER`.
        geometry: the network's family reads size and crop of an image.
    """
    data = recipe.data
    errors: list[str] = []
    if manifest.streams:
        names = ', '.join(manifest.streams)
        remedy = f'name the one to train on: {setting.rstrip("/")}/{manifest.streams[0]}, each further one as a stream of its own'
        if all(map(is_bucket_name, manifest.streams)):
            remedy += ', or train on all of these aspect-ratio buckets with data.aspect_buckets=true'
        return [f'manifest names the streams {names}; {remedy}']
    if manifest.kind != data.kind:
        return [f'manifest kind is {manifest.kind}, data.kind is {data.kind}; set data.kind={manifest.kind} or convert the data']
    if manifest.num_samples == 0:
        errors.append(f'manifest num_samples is 0 (dropped: {manifest.dropped or "nothing"}); there is nothing to train on')
    errors += _wrong_size(manifest, data)
    return errors + (_unlike_networks(manifest, recipe, vae_sha256, geometry) if isinstance(recipe, Recipe) else [])


def _unlike_networks(manifest: Manifest, recipe: Recipe, vae_sha256: str | None, geometry: bool) -> list[str]:
    """Return errors: what does not fit the network, its encoders or its adapter."""
    errors: list[str] = []
    missing = [column for column in GEOMETRY_COLUMNS[manifest.kind] if column not in manifest.columns] if geometry else []
    if missing:
        again = {'images': 'convert', 'latents': 'encode'}[manifest.kind]
        errors.append(
            f'manifest columns has no {" and ".join(missing)}, which model.network={recipe.model.network} is trained with; {again} the images again'
        )
    if manifest.text_encoder and recipe.adapter is not None and recipe.adapter.text_encoders:
        errors.append(
            'manifest text_encoder: the dataset stores encoded text, which text encoders that are trained would change; encode it again without '
            '--text-embeddings, or set adapter.text_encoders=false adapter.text_lr=null adapter.text_weight_decay=null'
        )
    if manifest.kind == 'latents':
        made_with = manifest.encoder.get('vae_sha256')
        if vae_sha256 is not None and made_with != vae_sha256:
            errors.append(
                f'manifest encoder.vae_sha256 is {str(made_with)[:12]} ({manifest.encoder.get("source")}), the VAE of '
                f'model.encoders.source={recipe.model.encoders.source} has {vae_sha256[:12]}; these latents were made by another VAE'
            )
    return errors


def _wrong_size(manifest: Manifest, data: Data | AutoencoderData) -> list[str]:
    side, bucket = data.resolution, manifest.bucket_px
    if data.aspect_buckets:
        again = f'convert again with --buckets aspect:{side}'
        if side % BUCKETS_MULTIPLE_PX:
            again = (
                f'set data.resolution to a multiple of {BUCKETS_MULTIPLE_PX}, which aspect buckets need, and convert again with --buckets aspect:PX'
            )
        again += '' if manifest.kind == 'images' else ' and encode with --resolution bucket'
        if bucket is None:
            return [f'manifest bucket has no width_px and height_px, data.aspect_buckets is true; {again}, or set data.aspect_buckets=false']
        if not LEAST_BUCKET_AREA * side**2 <= math.prod(bucket) <= side**2:
            return [
                f'manifest bucket is {bucket[0]} x {bucket[1]} px, as much as a square of {math.isqrt(math.prod(bucket))}, data.resolution is '
                f'{side}; {again}, or set data.resolution to the PX of the --buckets aspect:PX that it was converted with'
            ]
        return []
    if manifest.kind == 'images':
        if manifest.min_side_px is not None and manifest.min_side_px < side:
            return [
                f'manifest min_side_px is {manifest.min_side_px}, data.resolution is {side}: small images would be '
                f'enlarged; convert again with --min-side {side}'
            ]
        return []
    if bucket is not None and bucket != (side, side):
        return [
            f'manifest bucket is {bucket[0]} x {bucket[1]} px, data.aspect_buckets is false; encode the images again with '
            f'--resolution {side}, or set data.aspect_buckets=true'
        ]
    if bucket is None and manifest.resolution != side:
        return [
            f'manifest resolution is {manifest.resolution}, data.resolution is {side}; encode the images again '
            f'with --resolution {side}, or set data.resolution={manifest.resolution}'
        ]
    return []


def is_bucket_name(stream: str) -> bool:
    """Whether a stream has the name of an aspect bucket: WIDTHxHEIGHT."""
    return re.fullmatch(r'\d+x\d+', stream) is not None
