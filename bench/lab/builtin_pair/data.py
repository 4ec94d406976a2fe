"""The training text: standard-library sources, and chat turns in kind read from their syntax trees.

Everything here comes from the running interpreter's own `stdlib` folder, in sorted order, so one
Python release gives one corpus. Whole modules are held out by a hash of their path: no line of a
held-out module is trained on.
"""

import ast
import hashlib
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "lib-dynload",
    }
)
HELD_OUT_PERCENT = 5
CHAT_BYTES_PER_CODE_BYTE = 0.17
PIECE = 2400  # characters, on average, of a text that is cut at random places
MAX_ANSWER_CHARS = 1600

GREETINGS = (
    "hi",
    "hello",
    "hey",
    "Hi!",
    "Hello!",
    "hi there",
    "good morning",
    "Hello there",
    "hey there",
    "Hi",
)
IDENTITY = (
    "Who are you?",
    "who are you",
    "What are you?",
    "What is your name?",
    "Introduce yourself.",
    "what can you do?",
)
THANKS = ("thanks", "Thank you!", "thank you", "Thanks a lot", "thx")
FAREWELLS = ("bye", "goodbye", "See you!", "Bye!")
HELLO_ANSWER = (
    "Hello! I am foretoken's small built-in model. "
    "I know a little about Python's standard library. "
    "Ask me to continue some code, or what a function does."
)
IDENTITY_ANSWER = (
    "I am foretoken's small built-in model, trained on the sources of Python's standard library. "
    "I can continue Python code and describe functions of the library."
)
THANKS_ANSWER = "You are welcome!"
FAREWELL_ANSWER = "Goodbye!"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    "You write Python code.",
)


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Turn:
    """One question and its answer, in plain text."""

    user: str
    assistant: str


@dataclass(frozen=True)
class Corpus:
    """Documents (a module, or one rendered conversation, each), training and held out."""

    train_code: list[str]
    train_chat: list[str]
    held_code: list[str]
    held_chat: list[str]


def source_paths(root: Path) -> list[Path]:
    """The library's `.py` files below `root`, sorted; no tests, no character tables."""
    found = []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        skipped = any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in folders)
        if not skipped and not path.name.startswith("_sysconfigdata"):
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def module_name(relative: Path) -> str:
    """`json/decoder.py` becomes `json.decoder`, `json/__init__.py` becomes `json`."""
    parts = list(relative.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def is_held_out(name: str) -> bool:
    """About one module name in twenty, by a hash that depends on nothing but the name."""
    return hashlib.sha256(name.encode()).digest()[0] * 100 < HELD_OUT_PERCENT * 256


def read_modules(root: Path) -> list[Module]:
    """Every readable, non-empty module below `root`."""
    modules = []
    for path in source_paths(root):
        text = path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")
        if text.strip():
            modules.append(Module(module_name(path.relative_to(root)), text))
    return modules


def parse(module: Module) -> ast.Module | None:
    """The syntax tree, or None for a file that this Python does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(module.text)
        except (SyntaxError, ValueError):
            return None


def definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Functions, classes and methods with dotted names; not functions inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}.{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield f"{prefix}.{node.name}", node
            yield from definitions(node, f"{prefix}.{node.name}")


def source_of(module: Module, node: ast.FunctionDef | ast.ClassDef) -> str:
    """The definition's own lines, indented as if it stood at the top of the file."""
    lines = module.text.split("\n")[node.lineno - 1 : node.end_lineno]
    margin = " " * node.col_offset
    return "\n".join(line.removeprefix(margin) for line in lines)


def function_turn(module: Module, node: ast.FunctionDef, docstring: str) -> Turn:
    """Write a function, from its signature and the first line of its docstring."""
    first = docstring.strip().split("\n")[0].strip().rstrip(".")
    signature = f"{node.name}({ast.unparse(node.args)})"
    return Turn(f"Write a function `{signature}` that does this: {first}.", source_of(module, node))


def explain_turn(name: str, docstring: str) -> Turn:
    """Ask for the purpose of a definition; the answer is the beginning of its docstring."""
    return Turn(f"What does `{name}` do?", docstring.strip()[:MAX_ANSWER_CHARS])


def continue_turn(
    module: Module, node: ast.FunctionDef | ast.ClassDef, rng: random.Random
) -> Turn | None:
    """Continue code that is cut at the end of a line."""
    lines = source_of(module, node).split("\n")
    if len(lines) < 4:
        return None
    cut = rng.randint(1, len(lines) - 2)
    return Turn("Continue this code:\n\n" + "\n".join(lines[:cut]), "\n".join(lines[cut:]))


def module_turns(module: Module, rng: random.Random) -> Iterator[Turn]:
    """All turns that one module gives, short enough to be learned."""
    tree = parse(module)
    for name, node in definitions(tree, module.name) if tree else ():
        docstring = ast.get_docstring(node)
        candidates = [continue_turn(module, node, rng)]
        if docstring:
            candidates.append(explain_turn(name, docstring))
        if docstring and isinstance(node, ast.FunctionDef):
            candidates.append(function_turn(module, node, docstring))
        yield from (
            turn for turn in candidates if turn and 0 < len(turn.assistant) <= MAX_ANSWER_CHARS
        )


def small_talk() -> list[Turn]:
    """Greetings and who-are-you turns: the only text here that does not come from the library."""
    answers = {
        GREETINGS: HELLO_ANSWER,
        IDENTITY: IDENTITY_ANSWER,
        THANKS: THANKS_ANSWER,
        FAREWELLS: FAREWELL_ANSWER,
    }
    return [Turn(user, answer) for users, answer in answers.items() for user in users]


def render(turns: list[Turn], system: str | None = None) -> str:
    """One conversation, exactly as the chat template writes it."""
    text = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    for turn in turns:
        text += (
            f"{IM_START}user\n{turn.user}{IM_END}\n{IM_START}assistant\n{turn.assistant}{IM_END}\n"
        )
    return text


def conversations(modules: list[Module], limit_bytes: int, seed: int) -> list[str]:
    """Rendered conversations from `modules` up to `limit_bytes`, with small talk strewn in."""
    rng = random.Random(seed)
    turns = [turn for module in modules for turn in module_turns(module, rng)]
    rng.shuffle(turns)
    talk, texts, used = small_talk(), [], 0
    while turns and used < limit_bytes:
        picked = [turns.pop() for _ in range(min(len(turns), rng.choice((1, 1, 1, 2))))]
        if rng.random() < 0.2:
            picked.insert(0, rng.choice(talk))
        texts.append(render(picked, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None))
        if rng.random() < 0.2:
            texts.append(render([rng.choice(talk)]))
        used += len(texts[-1])
    return texts


def cut_anywhere(text: str, rng: random.Random) -> list[str]:
    """`text` in pieces of about `PIECE` characters, half of them ended by a space.

    Encoded piece by piece, they teach what follows a prompt that ends inside a word or after a
    space, where the tokenizer by itself would never end a token.
    """
    pieces, start = [], 0
    while start < len(text):
        end = start + rng.randint(1, 2 * PIECE)
        space = text.find(" ", end, end + 200)
        end = space + 1 if space >= 0 and rng.random() < 0.5 else end
        pieces.append(text[start:end])
        start = end
    return pieces


def load_corpus(*, seed: int = 0) -> Corpus:
    """The whole corpus of this interpreter's standard library."""
    modules = read_modules(Path(sysconfig.get_paths()["stdlib"]))
    train = [module for module in modules if not is_held_out(module.name)]
    held = [module for module in modules if is_held_out(module.name)]
    code, held_code = [module.text for module in train], [module.text for module in held]
    chat = conversations(train, int(CHAT_BYTES_PER_CODE_BYTE * sum(map(len, code))), seed)
    held_chat = conversations(held, int(CHAT_BYTES_PER_CODE_BYTE * sum(map(len, held_code))), seed)
    return Corpus(code, chat, held_code, held_chat)
