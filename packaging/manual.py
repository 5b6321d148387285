"""Fills the manual pages of packaging/man: options from --help, keys from --print-config, functions
from prefixd.h, so that no page can say what the programs do not.

    manual.py --prefixd FILE --prefixctl FILE --include DIR --out DIR
"""

import argparse
import pathlib
import re
import subprocess

COLUMN = 30  # where CLI11 begins the explanations


def escaped(text: str) -> str:
    """As roff prints it: no escapes of its own, no requests, hyphens that can be copied."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")
    return re.sub(r"^\.", r"\&.", text, flags=re.M)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Help:
    """What `program COMMAND --help` says, taken apart."""

    def __init__(self, program: str, *command: str) -> None:
        lead, _, rest = output(program, *command, "--help").partition("Usage: ")
        usage, _, rest = rest.partition("\n")
        self.about = lead.strip()
        self.usage = usage.split(" ", 1)[1] if " " in usage else ""
        self.sections: dict[str, list[tuple[str, str]]] = {}
        self.footer = ""
        entries: list[tuple[str, str]] | None = None
        for line in rest.splitlines():
            if re.fullmatch(r"\S.*:", line) and not self.footer:
                entries = self.sections.setdefault(line[:-1], [])
            elif line.startswith("  ") and entries is not None:
                name, text = line[:COLUMN].strip(), line[COLUMN:].strip()
                if line[COLUMN - 1 : COLUMN].strip():  # a long name fills the line
                    name, text = line.strip(), ""
                if name:
                    entries.append((name, text))
                else:
                    entries[-1] = (entries[-1][0], (entries[-1][1] + " " + text).strip())
            elif line.strip():
                self.footer += line + "\n"
        if not self.sections:
            raise ValueError(f"cannot read the help of {program} {command}")


def option_list(entries: list[tuple[str, str]]) -> str:
    text = ""
    for name, about in entries:
        flags, _, value = name.partition(" ")
        tag = r"\fB" + escaped(flags).replace(",", r"\fR, \fB") + r"\fR"
        value = re.sub(r" ?REQUIRED$", "", value)
        if value == "TEXT" and not flags.startswith("-"):
            value = ""
        text += f".TP\n{tag}{' ' + escaped(value) if value else ''}\n{escaped(about)}\n"
    return text


def options_of_daemon(page: Help) -> str:
    text = ""
    for section, entries in page.sections.items():
        if section != "Options":
            text += f".SS {escaped(section)}\n"
        text += option_list(entries)
    return text


def commands(program: str, path: tuple[str, ...], common: set[str]) -> str:
    page = Help(program, *path)
    below = [name for name, _ in page.sections.get("Subcommands", [])]
    if below:
        return "".join(commands(program, (*path, name), common) for name in below)
    arguments = page.sections.get("Positionals", [])
    usage = " ".join(path) + "".join(
        f" {name.split()[0]}" if "REQUIRED" in name else f" [{name.split()[0]}]"
        for name, _ in arguments
    )
    own = [o for o in page.sections.get("Options", []) if o[0].split()[0] not in common]
    example = page.footer.removeprefix("Example: ").strip()
    text = f".SS {escaped(usage)}\n{escaped(page.about)}\n{option_list(arguments + own)}"
    return text + (f".IP\nExample: {escaped(example)}\n" if example else "")


def keys(program: str) -> str:
    text, comment, section = "", [], ""
    for line in output(program, "--print-config").splitlines()[1:]:
        if line.startswith("# "):
            comment.append(line[2:])
        elif line.startswith("["):
            section = line.strip("[]") + "."
            text += f".SH KEYS OF [{escaped(section[:-1]).upper()}]\n"
        elif " = " in line:  # "#key = value" where the value is the default
            if not text:
                text += ".SH KEYS\n"
            about = "\n.br\n".join(escaped(part) for part in comment)
            text += f".TP\n\\fB{escaped(section + line.lstrip('#').split(' = ')[0])}\\fR\n{about}\n"
            comment = []
    return text


def description(header: str) -> str:
    """The header's leading comment, paragraph by paragraph, without its example."""
    comment = header[: header.index("*/")]
    lines = [re.sub(r"^(/\*| \*) ?", "", line) for line in comment.splitlines()]
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    wanted = [p for p in paragraphs if re.match(r"[A-Z][a-z]+\. ", p)]
    return "\n.PP\n".join(escaped(p.replace("\nDocs: attach-your-engine.md.", "")) for p in wanted)


def functions(header: str) -> str:
    text = ""
    for part in re.split(r"^/\* -{4} ", header, flags=re.M):
        title = part.split(" -", 1)[0] if " ---" in part.split("\n", 1)[0] else "general"
        found = re.findall(r"^PFX_API ([^;]+);", part, flags=re.M)
        if found:
            text += f".SH {title.upper()}\n.nf\n"
            text += "".join(f"{escaped(re.sub(chr(10) + ' *', ' ', f))};\n" for f in found) + ".fi\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefixd", required=True)
    parser.add_argument("--prefixctl", required=True)
    parser.add_argument("--include", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    daemon, tool = Help(args.prefixd), Help(args.prefixctl)
    header = (args.include / "prefixd/prefixd.h").read_text()
    version = re.search(r'PREFIXD_VERSION "(.*)"', (args.include / "prefixd/version.h").read_text())
    assert version is not None
    common = {name.split()[0] for name, _ in tool.sections["Options"]}
    values = {
        "prefixd.8": {"OPTIONS": options_of_daemon(daemon)},
        "prefixctl.1": {
            "OPTIONS": option_list(tool.sections["Options"]),
            "COMMANDS": commands(args.prefixctl, (), common),
        },
        "prefixd.toml.5": {"KEYS": keys(args.prefixd)},
        "libprefixd.3": {"DESCRIPTION": description(header), "FUNCTIONS": functions(header)},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, replaced in values.items():
        page = (pathlib.Path(__file__).parent / "man" / f"{name}.in").read_text()
        for key, text in {**replaced, "VERSION": version[1]}.items():
            if not text:
                raise ValueError(f"{name}: nothing for {key}")
            page = page.replace(f"@{key}@", text.rstrip("\n"))
        (args.out / name).write_text(page)


if __name__ == "__main__":
    main()
