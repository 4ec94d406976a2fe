"""The arguments of ``foretoken run`` and ``foretoken chat``."""

from __future__ import annotations

from ..flags import Parser, add_verbose


def add_run_flags(parser: Parser) -> None:
    """Add the arguments of ``foretoken run``, except settings."""
    parser.add_argument(
        "words",
        metavar="[MODEL] [PROMPT]",
        nargs="*",
        default=[],
        help="MODEL: a folder, a .gguf file, OWNER/NAME or smollm2, as for serve; PROMPT: "
        "any other "
        "text. Without a prompt or piped input, starts a conversation",
    )
    _add_answer_flags(parser)
    parser.add_argument(
        "--raw", action="store_true", help="continue the text without a chat template"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image file to put before the prompt; repeatable",
    )
    parser.add_argument(
        "--json-schema",
        metavar="FILE",
        help="JSON schema of the answer: a file, or the schema itself, starting with {",
    )


def add_chat_flags(parser: Parser) -> None:
    """Add the flags of ``foretoken chat``, except the model and settings."""
    _add_answer_flags(parser)
    parser.add_argument("--url", metavar="URL", help="server to use instead of a local model")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="API key of the server (FORETOKEN_API_KEY)",
    )


def _add_answer_flags(parser: Parser) -> None:
    """Add the flags of conversations and of their display."""
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--stats", action="store_true", help="print statistics of each answer to standard error"
    )
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="colour each token by its draft source, and print a legend and the statistics of "
        "--stats; colours need a terminal or FORCE_COLOR; NO_COLOR disables them",
    )
    add_verbose(parser)
