# shellcheck shell=bash
# For scripts that print their command instead of running it: they source this file.

# is_true NAME: succeed if the variable NAME holds a true word; end the script if it holds no such word at all.
is_true() {
    local word
    word="$(printf '%s' "${!1:-}" | tr '[:upper:]' '[:lower:]')"
    case "$word" in
        1 | y | yes | true | on) return 0 ;;
        "" | 0 | n | no | false | off) return 1 ;;
    esac
    echo "$1 is '${!1}', but must be 1 or 0 (or yes, true, on, no, false, off): correct it" >&2
    exit 2
}

# print_command WORD...: print a command that can be pasted into a shell, with a flag and its values on each line.
print_command() {
    local word line=""
    for word in "$@"; do
        if [[ "$word" == --* || "$word" == -m || "$word" == bash ]] && [[ -n "$line" ]]; then
            printf '%s \\\n' "$line"
            line="   "
        fi
        if [[ ! "$word" =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
            word="'${word//\'/\'\\\'\'}'"
        fi
        line+="${line:+ }$word"
    done
    printf '%s\n' "$line"
}
