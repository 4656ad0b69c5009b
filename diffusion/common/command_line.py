"""Command lines made from typed requests: a field of a pydantic model is an option or a positional argument, declared once.

    class Draw(Arguments):
        model: Path = positional('MODEL', 'exported model')
        steps: PositiveInt | None = option(None, 'sampling steps', 'N')

    request = Draw.parse('diffusion.draw', __doc__)

argparse splits the command line and prints the help; pydantic converts and checks all values together, so every mistake is reported at once.
tyro reports the first mistake only and takes `None` for a value, pydantic-settings splits prompts at their commas, typer reads function
signatures: a request that is built in tests and by other commands would be described a second time.
"""

import argparse
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from diffusion.common.text import did_you_mean, print_page, printable

MAX_SIDE_PX = 4096  # of a drawn image: a U-Net's attention over more takes terabytes
LARGEST_SEED = 2**32 - 1


def positional(metavar: str, help: str = '', default: Any = ...) -> Any:
    """Declare a positional argument; that of a list takes one or more words, none if it has a default."""
    return Field(default, description=help, json_schema_extra={'positional': True, 'metavar': metavar})


def option(default: Any, help: str, metavar: str | None = None, *, group: str | None = None, several: bool = False) -> Any:
    """Declare an option `--name-of-the-field`. A bool is a flag, `bool | None` one with `--no-`; an option of a list may be
    repeated.

    Args:
        default: `...` if the option must be given. Printed with the help unless that names a default itself.
        group: title under which the help lists it.
        several: several words follow one option.
    """
    return Field(default, description=help, json_schema_extra={'positional': False, 'metavar': metavar, 'group': group, 'several': several})


class Arguments(BaseModel):
    """Base of typed requests."""

    model_config = ConfigDict(frozen=True, extra='forbid', arbitrary_types_allowed=True)

    @classmethod
    def parse(cls, module: str, doc: str | None, epilog: str | None = None, words: list[str] | None = None) -> Self:
        """Read the command line of `python -m module`, described by the module's docstring.

        Options are written out: the beginning of one may mean another option tomorrow. Ends the process after --help, and with exit code 2 and
        a line per mistake.

        Args:
            words: command line (default: that of this process).
        """
        names = {name: _shown_name(name, field) for name, field in cls.model_fields.items()}
        positionals = [name for name, field in cls.model_fields.items() if _extra(field)['positional']]
        usage = ' '.join(['%(prog)s [options]', *(_usage(cls.model_fields[name]) for name in positionals)])
        parser = CommandParser(module, doc, epilog=epilog, usage=usage)
        _add_fields(parser, cls)
        given, rest = parser.parse_known_intermixed_args(words)
        unknown = [f'{word}: unknown option{did_you_mean(word, names.values())}' for word in rest if word.startswith('-')]
        errors = unknown or [f'{word}: unexpected argument' for word in rest]
        try:
            unsaid: dict[str, tuple[Any, ...]] = {
                name: (None, [], False if field.annotation is bool else None) for name, field in cls.model_fields.items()
            }
            request = cls.model_validate({name: value for name, value in vars(given).items() if value not in unsaid[name]})
        except ValidationError as invalid:
            for error in _one_per_value(invalid.errors()):
                name = str(error['loc'][0]) if error['loc'] else ''
                if not (unknown and name in positionals):  # it may be the value of an unknown option
                    errors.append(f'{names.get(name, "")}{describe_mistake(error)}')
        if errors:
            parser.error(f'\n{parser.prog}: error: '.join(errors))
        return request


class CommandParser(argparse.ArgumentParser):
    """An argument parser for `python -m MODULE`, described by the module's docstring. Commands import nothing heavy before they have parsed."""

    def __init__(self, module: str, doc: str | None, **options: Any):
        described = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f'python -m {module}', description=doc, formatter_class=described, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as ArgumentParser does, and refuse arguments that are not UTF-8: no recipe, manifest or page could name such a path afterwards."""
        for text in sys.argv[1:] if args is None else args:
            if (readable := text.encode(errors='backslashreplace').decode()) != text:
                self.error(f'{readable}: is not UTF-8; rename the file or folder')
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None) -> None:
        print_page(self.format_help().rstrip())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status, None if message is None else printable(message))


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra  # type: ignore[return-value]


def _may_be_bool(field: FieldInfo) -> bool:
    return field.annotation is bool or field.annotation == bool | None


def _is_list(field: FieldInfo) -> bool:
    return 'list' in str(field.annotation)


def _shown_name(name: str, field: FieldInfo) -> str:
    return _extra(field)['metavar'] if _extra(field)['positional'] else f'--{name.rstrip("_").replace("_", "-")}'


def _usage(field: FieldInfo) -> str:
    text = f'{_extra(field)["metavar"]}{" ..." if _is_list(field) else ""}'
    return text if field.is_required() else f'[{text}]'


def _add_fields(parser: argparse.ArgumentParser, request: type[Arguments]) -> None:
    groups: dict[str | None, argparse._ActionsContainer] = {None: parser}
    for name, field in request.model_fields.items():
        extra, is_list = _extra(field), _is_list(field)
        if extra['positional']:  # never required by argparse: pydantic reports a missing one together with all other mistakes
            parser.add_argument(name, nargs='*' if is_list else '?', metavar=extra['metavar'], help=_help(field))
            continue
        if extra['group'] not in groups:
            groups[extra['group']] = parser.add_argument_group(extra['group'])
        how: dict[str, Any] = {'metavar': extra['metavar'] or _choices(field)}
        if _may_be_bool(field):
            how = {'action': 'store_true' if field.annotation is bool else argparse.BooleanOptionalAction}
        if is_list:
            how |= {'nargs': '+'} if extra['several'] else {'action': 'append'}
        groups[extra['group']].add_argument(_shown_name(name, field), dest=name, help=_help(field), **how)


def _choices(field: FieldInfo) -> str | None:
    """Return `{fp32,bf16}` for a Literal, also an optional one; None for other types."""
    for kind in (field.annotation, *getattr(field.annotation, '__args__', ())):
        if getattr(kind, '__origin__', None) is Literal:
            return f'{{{",".join(kind.__args__)}}}'  # type: ignore[union-attr]
    return None


def _help(field: FieldInfo) -> str:
    text, default = (field.description or '').replace('%', '%%'), field.default
    if default in (None, '', ..., PydanticUndefined) or default is False or default == [] or '(default' in text:
        return text
    return f'{text} (default {default:g})' if isinstance(default, float) else f'{text} (default {default})'


def _one_per_value(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Keep the first error of each argument: a union reports one for each of its members."""
    return list({error['loc'][:1] or (error['msg'],): error for error in reversed(errors)}.values())[::-1]


def describe_mistake(error: ErrorDetails) -> str:
    limits = error.get('ctx', {})
    match error['type']:
        case 'missing':
            return ': is required'
        case 'value_error' if error['loc']:
            return f' {_given(error)}: {limits["error"]}'
        case 'value_error':
            return str(limits['error'])
        case 'int_parsing' | 'int_type' | 'int_from_float':
            text = 'is not a whole number'
        case 'float_parsing' | 'float_type' | 'finite_number':
            text = 'is not a number'
        case 'greater_than_equal':
            text = f'is below {limits["ge"]:,}'
        case 'greater_than':
            text = f'is not above {limits["gt"]:,}'
        case 'less_than_equal':
            text = f'is above {limits["le"]:,}'
        case 'less_than':
            text = f'is not below {limits["lt"]:,}'
        case 'literal_error':
            text = f'is not one of {limits["expected"].replace(" or ", ", ")}'
        case _:
            text = error['msg'][:1].lower() + error['msg'][1:]
    return f' {_given(error)}: {text}'


def _given(error: ErrorDetails) -> str:
    value = error['input']
    return f'{" ".join(map(str, value)) if isinstance(value, list | tuple) else value!s:.80}'


def split_names(text: Any) -> Any:
    """Return the parts of a text between its commas, and anything else unchanged."""
    if not isinstance(text, str):
        return text
    found = tuple(name.strip() for name in text.split(',') if name.strip())
    if not found or len(set(found)) < len(found):
        raise ValueError('is not a list of different names')
    return found


def _split_size(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    sides = text.split('x')
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 and int(side) % 16 == 0 for side in sides):
        raise ValueError('is not a size of multiples of 16, such as 512x768')
    return int(sides[0]), int(sides[1])


def _refuse_no_guidance(scale: float) -> float:
    if scale < 1:
        raise ValueError('is below 1, which is no guidance')
    return scale


def _split_ids(text: Any) -> Any:
    if isinstance(text, str) and not all(number.strip().isdigit() for number in text.split(',')):
        raise ValueError('is not a list of ids, such as 3,17')
    return [int(number) for number in text.split(',')] if isinstance(text, str) else text


Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Guidance = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_refuse_no_guidance)]
SidePx = Annotated[int, Field(ge=1, le=MAX_SIDE_PX)]
Size = Annotated[tuple[SidePx, SidePx], BeforeValidator(_split_size)]  # multiples of 16: a latent is 8 pixels, transformers join two a side
Names = Annotated[tuple[str, ...], BeforeValidator(split_names)]  # different names with commas between them
Ids = Annotated[tuple[int, ...], BeforeValidator(_split_ids)]
Precision = Literal['fp32', 'bf16']


class Prompts(Arguments):
    """The options of commands that draw prompts of the user's."""

    prompt: list[str] = option([], 'text to draw; repeatable')
    prompts_file: Path | None = option(None, 'file with a prompt a line', 'FILE')

    def prompts(self) -> list[str]:
        """Return the prompts of --prompt, then those of --prompts-file.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        lines = self.prompts_file.read_text().splitlines() if self.prompts_file else []
        return [*self.prompt, *(line for line in lines if line.strip())]
