"""The man page headstock(1), generated from the commands and their options when a wheel is built."""

import re

from headstock import __version__
from headstock.cli.command import SECTIONS
from headstock.cli.command_tree import CommandInfo, OptionInfo, command_tree

EXIT_STATUS = {
    "0": "Done.",
    "1": "Failed while working: full disk, no network, a check that did not pass.",
    "2": "The command line or an input was wrong.",
    "130, 143": "Stopped by Ctrl-C or SIGTERM.",
}
ENVIRONMENT = {
    "HEADSTOCK_CACHE": "The folder of the cache.",
    "HEADSTOCK_TOKEN": "The token of headstock serve, as with --token.",
    "HEADSTOCK_TIMEOUT": "Seconds that a process of torchrun waits for the others.",
    "HEADSTOCK_MAX_EXPANSION": "How many times its size a compressed file may expand to.",
}


def man_page() -> str:
    """The page in roff, for share/man/man1/headstock.1."""
    root = command_tree()
    verbs = {command.name: command for command in root.commands}
    lines = [f'.TH HEADSTOCK 1 "" "headstock {__version__}" "User Commands"']
    lines += [".SH NAME", escape(f"headstock - {root.summary[0].lower()}{root.summary[1:]}")]
    lines += [".SH SYNOPSIS", ".B headstock", r".I COMMAND\fR [\fIARGUMENTS\fR] [\fIOPTIONS\fR]"]
    lines += [".SH DESCRIPTION", *prose(root.help), "Every command takes the common options."]
    lines += [".SH COMMON OPTIONS"]
    some_verb = next(command for command in root.walk() if command.words and not command.commands)
    lines += options([option for option in some_verb.options if option.is_common])
    for section, names in SECTIONS.items():
        lines.append(f".SH {escape(section.upper())}")
        for name in names:
            for command in verbs[name].walk():
                lines += describe(command)
    lines += [".SH EXIT STATUS", *definitions(EXIT_STATUS)]
    lines += [".SH ENVIRONMENT", *definitions(ENVIRONMENT)]
    return "\n".join(lines) + "\n"


def describe(command: CommandInfo) -> list[str]:
    """A subsection: synopsis, help, options of its own."""
    lines = [f".SS headstock {escape(' '.join(command.words))}"]
    if not command.commands:
        synopsis = "".join(f" {argument_name(argument)}" for argument in command.arguments)
        lines += [rf"\fBheadstock {escape(' '.join(command.words))}\fR{synopsis} [\fIOPTIONS\fR]", ".PP"]
    lines += prose(command.help)
    return lines + options([option for option in (*command.arguments, *command.options) if not option.is_common])


def argument_name(argument: OptionInfo) -> str:
    name = rf"\fI{escape(argument.metavar)}\fR" + ("..." if argument.repeatable else "")
    return name if argument.required else f"[{name}]"


def options(infos: list[OptionInfo]) -> list[str]:
    lines = []
    for info in infos:
        names = ", ".join(rf"\fB{escape(name)}\fR" for name in info.names)
        value = rf"\fI{escape(info.metavar)}\fR" if info.metavar else ""
        lines += [".TP", " ".join(filter(None, [names, value])), escape(info.help)]
    return lines


def definitions(entries: dict[str, str]) -> list[str]:
    return [line for name, text in entries.items() for line in (".TP", rf"\fB{escape(name)}\fR", escape(text))]


def prose(text: str) -> list[str]:
    """Paragraphs, with each example on a line of its own."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        examples = re.findall(r"^Example: (.+)$", paragraph, re.MULTILINE)
        plain = " ".join(re.sub(r"^Example: .+$", "", paragraph, flags=re.MULTILINE).split())
        lines += [".PP", escape(plain)] if plain else []
        for example in examples:
            lines += [".PP", ".RS 4", ".nf", escape(example), ".fi", ".RE"]
    return lines[1:] if lines else []


def escape(text: str) -> str:
    """Text for roff: backslashes and hyphens are literal, and a line cannot begin with a control character."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    text = "".join(c if c.isascii() else rf"\[u{ord(c):04X}]" for c in text)
    return rf"\&{text}" if text.startswith((".", "'")) else text
