#!/usr/bin/env python3
"""Renders chat templates by Python's jinja2 in the environment that Hugging Face gives them, for `router/tests/templates.rs`.

    python make_goldens.py [FOLDER]    # FOLDER: *.jinja files; default: this one. Writes FOLDER/goldens.json

Needs jinja2 3.1.6. Every template is rendered with every conversation below; where a template refuses one, its words are kept.
"""

import datetime
import json
import pathlib
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2026, 7, 4, 9, 5, 3)
BOS, EOS = "<s>", "</s>"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place — today's \"best\" guess <b>&</b>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "City, e.g. Zürich"},
                "days": {"type": "integer", "minimum": 1, "default": 3},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Time now", "parameters": {"type": "object", "properties": {}}}}


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments, id="call00001"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_TURNS = [
    user("Weather in Zürich?"),
    assistant("", tool_calls=[call("get_weather", {"place": "Zürich", "days": 2, "share": 0.5, "exact": True, "list": [1, None]})]),
    {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"sky": "klar ☀"}'},
]

CASES = {
    "one turn": {"messages": [user("Hi!")]},
    "with a system message": {"messages": [system("Be brief."), user("  Name three fruits.\n")]},
    "several turns": {"messages": [system("Be brief."), user("Hi!"), assistant(" Hello. "), user("日本語 <b>&amp;</b> 'q' \"d\"")]},
    "no generation prompt": {"messages": [user("Hi!"), assistant("Hello.")], "add_generation_prompt": False},
    "thinking off": {"messages": [user("Hi!")], "enable_thinking": False, "thinking": False},
    "thoughts of before": {
        "messages": [user("1+1?"), assistant("<think>\nadd\n</think>\n\n2"), user("2+2?")],
    },
    "reasoning beside content": {
        "messages": [user("1+1?"), assistant("2", reasoning_content="add"), user("2+2?"), assistant("4", reasoning_content="again")],
        "add_generation_prompt": False,
    },
    "tools": {"messages": [user("Weather in Zürich?")], "tools": [WEATHER, CLOCK]},
    "tools and a system message": {"messages": [system("Be brief."), user("What time is it?")], "tools": [CLOCK]},
    "a tool was called": {"messages": TOOL_TURNS, "tools": [WEATHER]},
    "a tool answered": {"messages": [*TOOL_TURNS, assistant("Clear."), user("Thanks!")], "tools": [WEATHER]},
    "two calls at once": {
        "messages": [
            user("Time and weather?"),
            assistant("", tool_calls=[call("clock", {}, "call00001"), call("get_weather", {"place": "Bern"}, "call00002")]),
            {"role": "tool", "name": "clock", "tool_call_id": "call00001", "content": "09:05"},
            {"role": "tool", "name": "get_weather", "tool_call_id": "call00002", "content": "rain"},
        ],
        "tools": [WEATHER, CLOCK],
    },
    "documents": {
        "messages": [user("What is it about?")],
        "documents": [{"title": "First", "text": "Of paper."}, {"title": "Second", "text": "Of ink — 'black'."}],
    },
    "roles out of order": {"messages": [user("a"), user("b")]},
    "an unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
}


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: what an assistant said; a block without meaning when rendering."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_support"), [], [], body).set_lineno(line)

    def _support(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: NOW.strftime(form)
    return made


REASONING = ("reasoning_content", "thinking", "reasoning")


def prepared(messages):
    """As `apply_chat_template` does: no nulls, and a message's reasoning under both names that templates read."""
    out = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[key] for key in REASONING if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        out.append(message)
    return out


def render(template, case):
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **case}
    variables["messages"] = prepared(case["messages"])
    try:
        return {"text": template.render(bos_token=BOS, eos_token=EOS, **variables)}
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error)}
    except Exception as error:  # Python's own, such as a wrong type
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent
    made = environment()
    results = {}
    for path in sorted(folder.glob("*.jinja")):
        template = made.from_string(path.read_text(encoding="utf-8"))
        results[path.name] = {name: render(template, case) for name, case in CASES.items()}
    goldens = {"now": NOW.isoformat(), "bos": BOS, "eos": EOS, "cases": CASES, "templates": results}
    (folder / "goldens.json").write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    errors = sum("error" in one for template in results.values() for one in template.values())
    print(f"{len(results)} templates, {sum(map(len, results.values()))} renderings, {errors} of them refusals")


if __name__ == "__main__":
    main()
