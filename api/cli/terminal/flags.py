"""The arguments of ``foretoken run`` and ``foretoken chat``."""

from __future__ import annotations

from ..flags import Parser, add_verbose


def add_run_flags(parser: Parser) -> None:
    """Add the arguments of ``foretoken run`` but for settings."""
    parser.add_argument(
        "words",
        metavar="[MODEL] [PROMPT]",
        nargs="*",
        default=[],
        help="model, as for serve: a folder, a .gguf file, OWNER/NAME or smollm2; and the "
        "prompt, any other text. Without a prompt and piped input: a conversation",
    )
    _add_answer_flags(parser)
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it stands, without a chat template"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image to show to the model, before the prompt; repeatable",
    )
    parser.add_argument(
        "--json-schema",
        metavar="FILE",
        help="JSON schema that the answer follows: a file, or the schema itself, from its {",
    )


def add_chat_flags(parser: Parser) -> None:
    """Add the flags of ``foretoken chat`` but for the model and settings."""
    _add_answer_flags(parser)
    parser.add_argument(
        "--url", metavar="URL", help="server to talk to, in place of a model in this process"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="API key of that server (FORETOKEN_API_KEY)",
    )


def _add_answer_flags(parser: Parser) -> None:
    """Add the flags of a conversation and of what is shown of its answers."""
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--stats", action="store_true", help="print what each answer took to standard error"
    )
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="colour each token by its drafter, and print a legend and --stats; colours need a "
        "terminal or FORCE_COLOR, and NO_COLOR disables them",
    )
    add_verbose(parser)
