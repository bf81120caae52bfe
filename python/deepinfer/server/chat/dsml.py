"""DeepSeek's tool calls as structural tags.

Owns: the tags of V4's and V4.1's calls. Never touches: prompts, parsing (the `recipe` package's).

xgrammar makes the same tags (``get_model_structural_tag("deepseek_v4_1", ...)``; a test compares them), but importing it takes a front
process seconds and half a gigabyte; and its marks of reasoning are text, where these are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from deepinfer.server.conversation import Tool, ToolChoice

Format = dict[str, Any]


def dsml_format(version: Literal["v4", "v4_1"], tools: Sequence[Tool], choice: ToolChoice) -> Format:
    """Tool calls, and free text before them where they are not required. Arguments are held to a tool's schema if it is strict or a call
    is required."""
    gap = " " if version == "v4_1" else ""
    calls = f"｜DSML｜{gap}calls" if version == "v4_1" else "｜DSML｜tool_calls"
    style = "deepseek_v4_1_xml" if version == "v4_1" else "deepseek_xml"
    forced = choice.mode == "required"

    def tag(tool: Tool) -> Format:
        schema = (dict(tool.parameters) or True) if forced or tool.strict else True
        return {
            "type": "tag",
            "begin": f'<｜DSML｜{gap}invoke name="{tool.name}">\n',
            "content": {"type": "json_schema", "json_schema": schema, "style": style},
            "end": f"</｜DSML｜{gap}invoke>\n",
        }

    tags = [tag(t) for t in tools if choice.name in (None, t.name)]
    one = not choice.parallel or choice.name is not None
    inner = {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": True, "stop_after_first": one}
    if forced:
        begin = {"type": "const_string", "value": f"\n\n<{calls}>\n"}
        return {"type": "sequence", "elements": [begin, inner, {"type": "const_string", "value": f"</{calls}>"}]}
    whole = {"type": "tag", "begin": f"<{calls}>\n", "content": inner, "end": f"</{calls}>"}
    return {"type": "triggered_tags", "triggers": [f"<{calls}>"], "tags": [whole], "stop_after_first": True}
