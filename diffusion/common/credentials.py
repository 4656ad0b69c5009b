"""Keys, tokens and passwords: recipes may hold none, because logs and checkpoints hold the recipe; messages show none."""

import re

from diffusion.common.text import without_escapes

# oci://bucket@namespace carries none, only what follows a colon there would be one.
_USER = re.compile(r'(?<=://)([^/\s@:]*:[^/\s@]*|(?<=http://)[^/\s@]+|(?<=https://)[^/\s@]+)@')
_QUERY = re.compile(
    r'([?&;](?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|awsaccesskeyid|googleaccessid|(?:access_?|auth_?)?token|'
    r'(?:api_?|access_?|secret_?)?key|password|secret)=)[^&;\s\'"]*',
    re.IGNORECASE,
)
# As their issuers prefix them, so that scanners find them; lengths are the least that were seen, less a margin.
_TOKEN = re.compile(
    r'-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*|'
    r'(?<![A-Za-z0-9])(?:'
    r'hf_[A-Za-z0-9]{16,}|'  # Hugging Face
    r'(?:AKIA|ASIA)[A-Z0-9]{16}|'  # AWS, permanent and temporary
    r'gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|'  # GitHub, GitLab
    r'sk-[\w-]{16,}|'  # OpenAI, Anthropic
    r'xox[a-z]-[\w-]{10,}|'  # Slack
    r'wandb_v\d_\w{16,}|'  # Weights & Biases, since 2025
    r'AIza[\w-]{30,}|'  # Google
    r'fleet-(?:owner|pool|node)-[\w-]{16,}|'  # this project's own
    r'eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*'  # a JSON web token
    r')'
)
_HEX_KEY = re.compile(r'[0-9a-f]{40}')  # Weights & Biases before; and a commit


def carries_credentials(text: str, may_be_commit: bool = True) -> bool:
    """Whether a text holds a password, a signed request, a token or a private key.

    Args:
        may_be_commit: 40 hex digits by themselves are the commit of a repository, not an API key of Weights & Biases.
    """
    text = without_escapes(text)
    return any(pattern.search(text) for pattern in (_USER, _QUERY, _TOKEN)) or (not may_be_commit and bool(_HEX_KEY.fullmatch(text.strip())))


def redacted(text: str) -> str:
    """Return the text with `***` in place of credentials, and then without escape sequences, behind which they are found too."""
    plain = without_escapes(text)
    safe = _TOKEN.sub('***', _QUERY.sub(r'\1***', _USER.sub('***@', plain)))
    return text if safe == plain else safe
