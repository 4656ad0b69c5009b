"""Keys and passwords in URLs: recipes may hold none, because logs and checkpoints hold the recipe; messages show none."""

from __future__ import annotations

import re

# oci://bucket@namespace carries none, only what stands behind a colon there would be one.
_USER = re.compile(r'(?<=://)([^/\s@:]*:[^/\s@]*|(?<=http://)[^/\s@]+|(?<=https://)[^/\s@]+)@')
_QUERY = re.compile(
    r'([?&;](?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|awsaccesskeyid|googleaccessid|(?:access_?|auth_?)?token|'
    r'(?:api_?|access_?|secret_?)?key|password|secret)=)[^&;\s\'"]*',
    re.IGNORECASE,
)
# What OmegaConf would put in the place of `${oc.env:NAME}`, and the resolved recipe would then show.
_VARIABLE = re.compile(r'\$\{\s*oc\.env\s*:\s*\w*(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)\w*', re.IGNORECASE)


def carries_credentials(text: str) -> bool:
    """Whether a value of a recipe names a user with a password, signs a request, or fetches a secret from the environment."""
    return any(pattern.search(text) for pattern in (_USER, _QUERY, _VARIABLE))


def redacted(text: str) -> str:
    """The same text with `***` in the place of credentials in its URLs."""
    return _QUERY.sub(r'\1***', _USER.sub('***@', text))
