// Writes the scripts. bash and zsh get a table of commands and one function that walks the words;
// fish gets one line for each option.
#include <set>
#include <string>
#include <vector>

#include "prefixctl/completion/completion.h"

namespace prefixd::ctl {
namespace {

// Puts a text between single quotes. fish reads \' between them, bash and zsh do not.
std::string Quoted(const std::string& text, bool fish = false) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'') {
      out += fish ? "\\'" : "'\\''";
    } else if (c == '\\' && fish) {
      out += "\\\\";
    } else {
      out += c == '\n' ? ' ' : c;
    }
  }
  return out + "'";
}

// Menus have one line for each entry, so only the first sentence of its help is shown.
std::string Brief(const std::string& help) {
  for (size_t at = 0; (at = help.find_first_of(".:;", at)) != std::string::npos; ++at) {
    if (at + 1 == help.size() || help[at + 1] == ' ') return help.substr(0, at);
  }
  return help;
}

// Returns the word that the shells' functions understand: @file, @prefix, @model, a|b, or "".
std::string ValueWord(const CompletionValue& value) {
  using Kind = CompletionValue::Kind;
  if (value.kind == Kind::kFile) return "@file";
  if (value.kind == Kind::kPrefix) return "@prefix";
  if (value.kind == Kind::kModel) return "@model";
  std::string words;
  for (const std::string& choice : value.choices) words += (words.empty() ? "" : "|") + choice;
  return words;
}

// Lists the daemon's ids or names. The call repeats the line's flags for address and tenant. The
// script reads JSON by lines, because prefixctl prints one field a line.
constexpr char kAskDaemon[] = R"sh(
_prefixctl_ask() {  # prefixes|models FIELD FLAGS...
  local what=$1 field=$2
  shift 2
  prefixctl "$what" list --json "$@" 2>/dev/null |
    sed -n 's/^ \{0,4\}"'"$field"'": "\([^"]*\)",\{0,1\}$/\1/p'
}
)sh";

constexpr char kBashWalk[] = R"sh(
_prefixctl() {
  local path=${1##*/} cur=${COMP_WORDS[COMP_CWORD]}
  local -a options=() subcommands=() arguments=() where=()
  local word option value i wanted= position=0 expects=
  [[ $cur == = ]] && cur=
  _prefixctl_command "$path"
  for ((i = 1; i < COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    if [[ $word == -* ]]; then
      expects=
      for option in "${options[@]}"; do
        [[ $option == "$word="* ]] && expects=y wanted=${option#*=}
      done
      if [[ $expects ]]; then
        # bash makes a word of its own of the sign in --option=value.
        [[ ${COMP_WORDS[i + 1]} == = && i+1 -lt COMP_CWORD ]] && ((++i))
        ((++i))
        ((i >= COMP_CWORD)) && break
        expects=
        value=${COMP_WORDS[i]}
      fi
      case $word in
        -s|--socket|--address|--tenant|--token-file|--tls-*) where+=("$word" "$value") ;;
        --all-tenants) where+=("$word") ;;
      esac
    elif [[ " ${subcommands[*]} " == *" $word "* ]]; then
      path+=" $word"
      _prefixctl_command "$path"
    else
      ((++position))
    fi
  done
  COMPREPLY=()
  if [[ ! $expects ]]; then
    if [[ $cur == -* ]]; then
      COMPREPLY=($(compgen -W "${options[*]%%=*}" -- "$cur"))
      return
    fi
    if ((${#subcommands[@]})); then
      COMPREPLY=($(compgen -W "${subcommands[*]}" -- "$cur"))
      return
    fi
    wanted=${arguments[position]}
  fi
  case $wanted in
    @file) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$cur")) ;;
    @prefix) COMPREPLY=($(compgen -W "$(_prefixctl_ask prefixes id "${where[@]}")" -- "$cur")) ;;
    @model) COMPREPLY=($(compgen -W "$(_prefixctl_ask models name "${where[@]}")" -- "$cur")) ;;
    *) COMPREPLY=($(compgen -W "${wanted//|/ }" -- "$cur")) ;;
  esac
}
complete -F _prefixctl prefixctl prefixd
)sh";

constexpr char kZshWalk[] = R"sh(
_prefixctl() {
  local -a options subcommands arguments where
  local -A values
  local command=${words[1]:t} word value wanted expects
  local -i i position=1
  _prefixctl_command $command
  for ((i = 2; i < CURRENT; ++i)); do
    word=${words[i]} value=
    if [[ $word == -* ]]; then
      if (( ${+values[$word]} )); then
        (( ++i ))
        if (( i >= CURRENT )); then
          expects=y wanted=${values[$word]}
          break
        fi
        value=${words[i]}
      fi
      case $word in
        (-s|--socket|--address|--tenant|--token-file|--tls-(ca|certificate|key)) where+=($word $value) ;;
        (--all-tenants|--socket=*|--address=*|--tenant=*|--token-file=*|--tls-*=*) where+=($word) ;;
      esac
    elif (( ${subcommands[(I)$word:*]} )); then
      command+=" $word"
      _prefixctl_command $command
    else
      (( ++position ))
    fi
  done
  if [[ -z $expects ]]; then
    if [[ $PREFIX == --*=* ]] && (( ${+values[${PREFIX%%=*}]} )); then
      wanted=${values[${PREFIX%%=*}]}
      compset -P 1 '*='
    elif [[ $PREFIX == -* ]]; then
      _describe -o option options
      return
    elif (( $#subcommands )); then
      _describe command subcommands
      return
    else
      wanted=${arguments[position]}
    fi
  fi
  case $wanted in
    (@file) _files ;;
    (@prefix) compadd -- ${(f)"$(_prefixctl_ask prefixes id $where)"} ;;
    (@model) compadd -- ${(f)"$(_prefixctl_ask models name $where)"} ;;
    (?*) compadd -- ${(s:|:)wanted} ;;
  esac
}
# Sourced, or loaded from a directory of $fpath and run at once.
if [[ $funcstack[1] == _prefixctl ]]; then
  _prefixctl "$@"
else
  compdef _prefixctl prefixctl prefixd
fi
)sh";

constexpr char kFishFunctions[] = R"sh(
function __prefixctl_path
    set -l words (commandline -opc)
    set -l path (string replace -r '.*/' '' -- $words[1])
    for word in $words[2..]
        contains -- "$path $word" $__prefixctl_commands; and set path "$path $word"
    end
    echo $path
end
function __prefixctl_at
    test (__prefixctl_path) = "$argv"
end
function __prefixctl_ask -a what field
    set -l words (commandline -opc)
    set -l where
    for i in (seq 2 (count $words))
        switch $words[$i]
            case -s --socket --address --tenant --token-file --tls-ca --tls-certificate --tls-key
                set -l next (math $i + 1)
                set -q words[$next]; and set -a where $words[$i] $words[$next]
            case --all-tenants '--socket=*' '--address=*' '--tenant=*' '--token-file=*' '--tls-*=*'
                set -a where $words[$i]
        end
    end
    prefixctl $what list --json $where 2>/dev/null |
        string replace -rf '^ {0,4}"'$field'": "([^"]*)",?$' '$1'
end
)sh";

std::string FishValue(const CompletionValue& value) {
  using Kind = CompletionValue::Kind;
  switch (value.kind) {
    case Kind::kFile:
      return " -F";
    case Kind::kPrefix:
      return " -f -a '(__prefixctl_ask prefixes id)'";
    case Kind::kModel:
      return " -f -a '(__prefixctl_ask models name)'";
    case Kind::kChoice:
    case Kind::kAnything:
      break;
  }
  std::string words;
  for (const std::string& choice : value.choices) words += (words.empty() ? "" : " ") + choice;
  return words.empty() ? " -f" : " -f -a " + Quoted(words, true);
}

}  // namespace

std::string BashCompletion(const std::vector<CompletionCommand>& commands) {
  std::string out =
      "# bash completion of prefixctl and prefixd, as `prefixctl completion bash` prints it.\n";
  out += kAskDaemon;
  out += "\n_prefixctl_command() {\n  options=() subcommands=() arguments=()\n  case $1 in\n";
  for (const CompletionCommand& c : commands) {
    out += "    " + Quoted(c.path) + ")\n      options=(";
    for (const CompletionOption& o : c.options) {
      for (const std::string& name : o.names) {
        out += Quoted(o.takes_value ? name + "=" + ValueWord(o.value) : name) + " ";
      }
    }
    out += ")\n      subcommands=(";
    for (const auto& [name, help] : c.subcommands) out += name + " ";
    out += ")\n      arguments=(";
    for (const CompletionValue& value : c.arguments) out += Quoted(ValueWord(value)) + " ";
    out += ") ;;\n";
  }
  return out + "  esac\n}\n" + kBashWalk;
}

std::string ZshCompletion(const std::vector<CompletionCommand>& commands) {
  std::string out =
      "#compdef prefixctl prefixd\n"
      "# zsh completion of prefixctl and prefixd, as `prefixctl completion zsh` prints it.\n";
  out += kAskDaemon;
  out += "\n_prefixctl_command() {\n  options=() subcommands=() arguments=() values=()\n";
  out += "  case $1 in\n";
  for (const CompletionCommand& c : commands) {
    std::string values;
    out += "    (" + Quoted(c.path) + ")\n      options=(\n";
    for (const CompletionOption& o : c.options) {
      for (const std::string& name : o.names) {
        out += "        " + Quoted(name + ":" + Brief(o.help)) + "\n";
        if (o.takes_value) values += " " + name + " " + Quoted(ValueWord(o.value));
      }
    }
    out += "      )\n      values=(" + values + " )\n      subcommands=(\n";
    for (const auto& [name, help] : c.subcommands) {
      out += "        " + Quoted(name + ":" + Brief(help)) + "\n";
    }
    out += "      )\n      arguments=(";
    for (const CompletionValue& value : c.arguments) out += Quoted(ValueWord(value)) + " ";
    out += ") ;;\n";
  }
  return out + "  esac\n}\n" + kZshWalk;
}

std::string FishCompletion(const std::vector<CompletionCommand>& commands) {
  std::string out =
      "# fish completion of prefixctl and prefixd, as `prefixctl completion fish` prints it.\n"
      "set -g __prefixctl_commands";
  std::set<std::string> programs;
  for (const CompletionCommand& c : commands) {
    out += " " + Quoted(c.path, true);
    programs.insert(c.path.substr(0, c.path.find(' ')));
  }
  out += "\n";
  out += kFishFunctions;
  for (const std::string& program : programs) out += "complete -c " + program + " -f\n";
  for (const CompletionCommand& c : commands) {
    const std::string line = "complete -c " + c.path.substr(0, c.path.find(' ')) + " -n " +
                             Quoted("__prefixctl_at " + c.path, true);
    for (const CompletionOption& o : c.options) {
      out += line;
      for (const std::string& name : o.names) {
        out += name[1] == '-' ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (o.takes_value) out += " -r" + FishValue(o.value);
      out += " -d " + Quoted(Brief(o.help), true) + "\n";
    }
    for (const auto& [name, help] : c.subcommands) {
      out += line + " -f -a " + name + " -d " + Quoted(Brief(help), true) + "\n";
    }
    // fish does not count arguments, so the values of each place are offered in all places.
    for (const CompletionValue& value : c.arguments) {
      if (value.kind != CompletionValue::Kind::kAnything) out += line + FishValue(value) + "\n";
    }
  }
  return out;
}

}  // namespace prefixd::ctl
