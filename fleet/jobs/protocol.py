"""Requests and answers of the service as models: what does not fit is refused before an endpoint runs, and docs/fleet-protocol.md is made of them."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from diffusion.common.text import printable, redacted, without_escapes
from fleet.jobs.spec import LARGEST_INPUT_BYTES, MAX_IMAGE_CHARS, MAX_PROMPTS, NAME

MAX_MESSAGE = 4000
MAX_REASON = 300
MAX_GPU_CHARS = 80
MAX_FILES = 2 * MAX_PROMPTS  # a job that draws hands over an image for each prompt, and more
MAX_STEPS = 2**31 - 1
MAX_RECIPES = 1000
MAX_POINTS = 1000
MAX_TOKENS = 1000
FILE_NAME = r'^[A-Za-z0-9][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9][A-Za-z0-9._-]{0,99}){0,3}$'
UNPRINTABLE = re.compile(r'[^\x20-\x7e\xa0-\ud7ff\ue000-\uffff]+')  # control characters, halves of surrogate pairs


def _plain_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError('may have letters, digits and . _ - alone, 64 at most: it becomes the name of a folder')
    return text


def _one_line_of_text(text: str) -> str:
    """Refuse what a terminal would obey: `fleet nodes` and the page show it to operators."""
    if UNPRINTABLE.search(text) or printable(text) != text:
        raise ValueError('holds control characters; leave them out')
    return text


def _shown_message(said: object) -> str:
    """Return the end of a machine's message, whatever it says, without credentials and without what a terminal would obey."""
    text = redacted(str(said or ''))[-MAX_MESSAGE:].replace('\0', '').encode(errors='replace').decode()
    return printable(without_escapes(text))[-MAX_MESSAGE:]


def _shown_reason(said: object) -> str:
    return UNPRINTABLE.sub(' ', str(said or ''))[:MAX_REASON].strip()


class ProtocolModel(BaseModel):
    """A JSON object of the protocol. Numbers are numbers, not texts; unknown keys are left alone, as a worker may be newer than the service."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


Name = Annotated[str, AfterValidator(_plain_name), Field(description='Letters, digits and . _ - alone, 64 at most.')]
LineOfText = Annotated[str, AfterValidator(_one_line_of_text)]
Epoch = Annotated[int, Field(ge=1, le=MAX_STEPS, description='Number of the attempt, as the lease gave it.')]
Steps = Annotated[int, Field(ge=0, le=MAX_STEPS)]
Sha256 = Annotated[str, Field(pattern='^[0-9a-f]{64}$')]


class FileContent(ProtocolModel):
    sha256: Sha256
    bytes: int = Field(ge=0, le=LARGEST_INPUT_BYTES)


Files = Annotated[dict[Annotated[str, Field(pattern=FILE_NAME)], FileContent], Field(max_length=MAX_FILES)]


Point = Annotated[list[float | None], Field(min_length=4, max_length=4)]
Curve = Annotated[
    list[Point], Field(max_length=MAX_POINTS, description='New points of the curve: step, loss, learning rate, steps/s; null: not known.')
]


# Asked by machines.


class EnrollRequest(ProtocolModel):
    machine: Name
    gpu: LineOfText = Field('cpu', max_length=MAX_GPU_CHARS, description='Its kind, such as rtx-4090.')
    gpu_gb: float = Field(ge=0, le=10_000, description='Memory of one GPU.')
    image: LineOfText = Field('', max_length=MAX_IMAGE_CHARS, description='Digest of the container image that the worker runs in.')
    gpus: int = Field(1, ge=1, le=1024, description='How many one job gets.')
    version: LineOfText = Field('', max_length=MAX_GPU_CHARS, description='Of its installation.')
    recipes: dict[Annotated[LineOfText, Field(max_length=200)], Sha256] = Field(
        {},
        max_length=MAX_RECIPES,
        description='Recipes that it has, {file name: SHA-256} of what they and those they are based on say, as JSON with sorted keys, the most '
        'basic first. It gets jobs of those that the service has with the same digest.',
    )


class LeaseRequest(ProtocolModel):
    epoch: Epoch


class RenewRequest(LeaseRequest):
    step: Steps = 0
    steps_per_sec: float | None = Field(default=None, ge=0, le=1e6)
    curve: Curve = []


class UrlsRequest(LeaseRequest):
    step: Steps | None = Field(default=None, description='Step of the checkpoint; null: the files are results.')
    files: Files = {}


class PublishRequest(LeaseRequest):
    step: Steps
    files: Files = {}


class EndRequest(LeaseRequest):
    exit_code: int | None = Field(default=None, ge=-255, le=255, description='Exit code of train.py.')
    ending: Literal['released', 'node_fault'] | None = Field(default=None, description='Set where the exit code does not say it.')
    message: Annotated[str, BeforeValidator(_shown_message)] = Field('', description=f'The last {MAX_MESSAGE:,} characters are kept.')
    step: Steps = 0
    files: Files = Field({}, description='Results of a job that is done.')
    curve: Curve = []


class Enrolled(ProtocolModel):
    node: str
    token: str = Field(description='For all further requests of this machine, and to enrol again under its name.')
    other_recipes: list[str] = Field([], description='Recipes of the service that this machine lacks, or has otherwise: it gets no job of them.')
    lease_sec: float
    renew_sec: float
    poll_sec: float
    grace_sec: float


class SignedGet(FileContent):
    url: str


class SignedPut(ProtocolModel):
    url: str
    headers: dict[str, str] = Field(description='Exactly these have to be sent.')


class SignedFiles(ProtocolModel):
    files: dict[str, SignedGet]


class SignedCheckpoint(SignedFiles):
    step: int


class SignedSources(ProtocolModel):
    """Everything that an attempt reads."""

    inputs: dict[str, SignedGet]
    checkpoint: SignedCheckpoint | None = Field(description='The one to resume from.')
    model: SignedFiles | None = Field(description='Results of the job whose images this one draws.')


class LeaseAnswer(SignedSources):
    job: str
    epoch: int
    name: str | None
    owner_hash: str
    kind: str
    recipe: str
    overrides: dict[str, Any]
    validation: dict[str, Any]
    hours_left: float
    num_steps: int = 0


class RenewAnswer(ProtocolModel):
    action: Literal['continue', 'stop', 'release']
    reason: str


class UrlsAnswer(ProtocolModel):
    files: dict[str, SignedPut]


class Done(ProtocolModel):
    """An empty object."""


# Asked by owners.


class UploadAnswer(ProtocolModel):
    input: SignedGet = Field(description='What a job says of it; the url is its place, s3://..., and not signed.')
    put: SignedPut | None = Field(default=None, description='Missing if its bytes are there already.')


class SubmitAnswer(ProtocolModel):
    jobs: list[str]


class StateAnswer(ProtocolModel):
    state: str


# Asked by operators.


class MachineAction(ProtocolModel):
    reason: Annotated[str, BeforeValidator(_shown_reason)] = ''


class AccountSettings(ProtocolModel):
    """Settings of an owner or a pool; null leaves one as it is."""

    model_config = ConfigDict(extra='forbid')

    name: Name
    create: bool = False
    new_token: bool = False

    @property
    def columns(self) -> dict[str, Any]:
        return self.model_dump(exclude={'name', 'create', 'new_token'}, exclude_none=True)


class OwnerSettings(AccountSettings):
    max_leased: int | None = Field(default=None, ge=0, le=100_000)
    max_queued: int | None = Field(default=None, ge=0, le=10_000_000)
    budget_dollars: float | None = Field(default=None, ge=0, le=1e9)
    operator: bool | None = None


class PoolSettings(AccountSettings):
    price_per_hour: float | None = Field(default=None, ge=0, le=10_000)
    trusted: bool | None = None
    max_machines: int | None = Field(default=None, ge=0, le=1_000_000, description='That are here at a time.')
    max_per_address: int | None = Field(
        default=None, ge=0, le=1_000_000, description='Of them from one address, those in quarantine too; not asked of a trusted pool.'
    )
    one_use: bool | None = Field(default=None, description='Machines enrol with tokens of their own alone (POST /pools/{name}/tokens).')


class TokensRequest(ProtocolModel):
    num: int = Field(ge=1, le=MAX_TOKENS)


class TokensAnswer(ProtocolModel):
    tokens: list[str] = Field(description='Shown once; each lets in one machine, once.')


class AccountAnswer(ProtocolModel):
    name: str
    created: bool
    token: str | None = Field(default=None, description='Shown once.')
    notice_key: str | None = Field(default=None, description='Shown once; 64 hex digits.')
