"""Calls of DeepSeek-V3.2 and V4, as DSML tags.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 writes ``tool_calls`` where V3.2 writes ``function_calls``. Sources: the encoders and cards of
deepseek-ai/DeepSeek-V3.2 and DeepSeek-V4 (ours: frontend/templates/deepseek_v32.jinja and deepseek_v4.jinja). Text is
written as it is, every other value as JSON, and ``string`` says which.
"""

from tokenspeed.frontend.parsing.invoke import InvokeTags

MARKERS = ("｜DSML｜",)


def _tags(block: str) -> InvokeTags:
    return InvokeTags(
        openings=(f"<｜DSML｜{block}>",),
        closings=(f"</｜DSML｜{block}>",),
        invoke="<｜DSML｜invoke",
        invoke_end="</｜DSML｜invoke>",
        parameter="<｜DSML｜parameter",
        parameter_end="</｜DSML｜parameter>",
    )


grammar_v32 = _tags("function_calls").grammar()
grammar_v4 = _tags("tool_calls").grammar()
