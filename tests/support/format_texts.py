"""Two calls in the formats of models, as their chat templates write them."""

from __future__ import annotations

NS = "]<]minimax[>["


def tagged(token: str, block: str) -> str:
    """Return calls of f and g between tags whose names begin with a token."""
    return (
        f'<{token}{block}>\n<{token}invoke name="f">\n'
        f'<{token}parameter name="s" string="true">x</{token}parameter>\n'
        f'<{token}parameter name="i" string="false">3</{token}parameter>\n'
        f'</{token}invoke>\n<{token}invoke name="g">\n</{token}invoke>\n</{token}{block}>'
    )


def kimi_k3(*calls: tuple[str, str]) -> str:
    """Return calls of Kimi K3, each with the name of a tool and the text of its arguments."""
    written = "".join(
        f'<|open|>call tool="{name}" index="{number}"<|sep|>{arguments}<|close|>call<|sep|>'
        for number, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|>"


def kimi_argument(key: str, kind: str, value: str) -> str:
    """Return an argument of Kimi K3."""
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def element(name: str, value: str) -> str:
    """Return an element of MiniMax M3."""
    return f"{NS}<{name}>{value}{NS}</{name}>"


def minimax_m3(*calls: tuple[str, str]) -> str:
    """Return calls of MiniMax M3, each with the name of a tool and the text of its arguments."""
    written = "".join(f'{NS}<invoke name="{n}">{inside}{NS}</invoke>\n' for n, inside in calls)
    return f"{NS}<tool_call>\n{written}{NS}</tool_call>"


def muse(*calls: tuple[str, str]) -> str:
    """Return calls of Muse, each with the name of a tool and the text of its arguments."""
    return "<|eom|><|start|>assistant".join(
        f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{inside}'
        "</atem:invoke>\n</atem:function_calls>"
        for name, inside in calls
    )


def atem(key: str, value: str) -> str:
    """Return an argument of Muse."""
    return f'<atem:parameter name="{key}">{value}</atem:parameter>\n'


S, I3 = kimi_argument("s", "string", "x"), kimi_argument("i", "number", "3")
ONE = '{"name": "f", "arguments": {"s": "x", "i": 3}}'
BOTH = {  # f(s="x", i=3) and g()
    "deepseek-dsml": tagged("｜DSML｜", "tool_calls"),
    "gigachat-gcml": tagged("｜GCML｜", "tool_calls"),
    "kimi-k3": kimi_k3(("f", S + I3), ("g", "")),
    "minimax-m3": minimax_m3(("f", element("s", "x") + element("i", "3")), ("g", "")),
    "muse": muse(("f", atem("s", "x") + atem("i", "3")), ("g", "")) + "<|eot|>",
    "apertus": '<|tools_prefix|>[{"f": {"s": "x", "i": 3}}, {"g": {}}]<|tools_suffix|>',
    "xlam": f'[{ONE}, {{"name": "g", "arguments": {{}}}}]',
    "gigachat3.1": f'<|function_call|>{ONE}\n{{"name": "g", "arguments": {{}}}}',
    "gigachat": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{ONE}"
    '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "g", "arguments": {}}',
}
BEGINNINGS = {  # how a call begins in formats whose first mark is not the whole of it
    "llama3": "{",
    "pythonic": "[",
    "xlam": "[",
    "harmony": "<|channel|>commentary",
    "deepseek-dsml": "<｜DSML｜tool_calls>",
    "gigachat-gcml": "<｜GCML｜tool_calls>",
    "kimi-k3": "<|open|>tools<|sep|>",
    "minimax-m3": f"{NS}<tool_call>",
    "muse": " to={tool}<|message|>",
    "gigachat": "<|message_sep|>\n\nfunction call<|role_sep|>",
}
UNMARKED = {"llama3", "pythonic", "xlam", "harmony", "muse"}  # no words before such a beginning
WRAPPED = {"harmony", "kimi-k3", "muse"}  # formats with marks around words
