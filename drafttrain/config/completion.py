"""What a shell offers while a command line is typed: commands, options, sections, choices, keys."""

import itertools
from dataclasses import fields
from pathlib import Path

from drafttrain.config.groups import choices, command_groups, keys_of, own_choices, own_groups
from drafttrain.config.overrides import UsageError
from drafttrain.config.sections import COMMANDS

# Hydra's own scripts (hydra.plugins.completion_plugin) want a file with @hydra.main, not a module.
BASH = r"""
_drafttrain() {
    local program=$1 line="${COMP_LINE:0:COMP_POINT}" word IFS=$'\n' i
    local -a ask=("$program")
    if [[ $program == *python* ]]; then
        [[ ${COMP_WORDS[1]} == -m && ${COMP_WORDS[2]} == drafttrain ]] || return
        ask+=(-m drafttrain)
    fi
    word="${line##* }"
    # Bash breaks words at "=": what stands before it is typed already.
    [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && word="${word%=*}=" || word=
    COMPREPLY=($("${ask[@]}" --shell-completion "query=$line" 2>/dev/null))
    for i in "${!COMPREPLY[@]}"; do
        [[ ${COMPREPLY[i]} == *[=.] ]] || COMPREPLY[i]+=" "
        COMPREPLY[i]="${COMPREPLY[i]#"$word"}"
    done
}
complete -o nospace -o default -F _drafttrain drafttrain python python3
"""
ZSH = r"""
_drafttrain() {
    local -a ask=($words[1]) found
    if [[ $words[1] == *python* ]]; then
        [[ $words[2] == -m && $words[3] == drafttrain ]] || { _default; return }
        ask+=(-m drafttrain)
    fi
    found=("${(@f)$($ask --shell-completion "query=${BUFFER[1,CURSOR]}" 2>/dev/null)}")
    [[ -n $found ]] && compadd -S '' -- $found || _default
}
compdef _drafttrain drafttrain python python3
"""
FISH = r"""
function __drafttrain
    set -l words (commandline -opc)
    set -l ask $words[1]
    if string match -q '*python*' -- $ask
        test "$words[2]" = -m -a "$words[3]" = drafttrain; or return
        set ask $ask -m drafttrain
    end
    $ask --shell-completion query=(commandline -cp | string collect) 2>/dev/null
end
for program in drafttrain python python3
    complete -c $program -a '(__drafttrain)'
end
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def answer(text: str, options: tuple[str, ...]) -> str:
    """Return what --shell-completion prints: the script of install=SHELL, or query=LINE's words."""
    what, _, value = text.partition("=")
    if what == "query":
        return "\n".join(completed(value, options))
    if what != "install" or value not in SCRIPTS:
        raise UsageError(
            f"--shell-completion must be install=SHELL, one of {', '.join(SCRIPTS)}, got {text}"
        )
    return SCRIPTS[value].strip()


def completed(line: str, options: tuple[str, ...]) -> list[str]:
    """Return the completions of the last word of a line, up to the cursor."""
    before, _, word = line.rpartition(" ")
    words = before.split()
    begin = next((i for i, text in enumerate(words) if Path(text).name == "drafttrain"), -1)
    words = words[begin + 1 :]
    told = itertools.pairwise(words)
    places = [place for option, place in told if option == "--config-dir"]
    places += [text.partition("=")[2] for text in words if text.startswith("--config-dir=")]
    with own_choices(Path(places[-1]) if places and Path(places[-1]).is_dir() else None):
        return [option for option in _options(words, word, options) if option.startswith(word)]


def _options(words: list[str], word: str, options: tuple[str, ...]) -> list[str]:
    command = next((text for text in words if text in COMMANDS), None)
    if word.startswith("-"):
        return list(options)
    if command is None:
        return list(COMMANDS)
    groups = command_groups(command)
    sections = [field.name for field in fields(COMMANDS[command])]
    if "--help" in words:
        return sections
    key, equals, value = word.partition("=")
    if equals:
        others, comma, _ = value.rpartition(",")  # several, of a sweep
        return [f"{key}={others}{comma}{name}" for name in sorted(choices(key.lstrip("+")))]
    section = key.partition(".")[0]
    if "." in key:
        told = [text.partition("=") for text in words]
        chosen = groups | {name: choice for name, _, choice in told if name in groups}
        keys = keys_of(command, section, chosen)
        return [f"{section}.{name}=" for name in keys if name != "_target_"]
    offered = [f"{group}=" for group in groups if group in sections and choices(group)]
    offered += [f"{section}." for section in sections]
    return offered + [f"+{group}=" for group in own_groups()]
