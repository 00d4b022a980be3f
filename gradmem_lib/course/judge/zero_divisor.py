"""Finds which divisor was 0 when a division raised ``ZeroDivisionError``."""

from __future__ import annotations

import ast
import linecache
from itertools import islice
from types import CodeType, TracebackType

from .compare import shortened

_DIVISIONS = (ast.Div, ast.FloorDiv, ast.Mod)


def zero_divisor(error: ZeroDivisionError, code: CodeType) -> str:
    """The source text of the divisor that was 0 in ``code``, such as "len(counts)".

    Empty in four cases: other code raised the error; no division did (but a call, or ``0 ** -1``);
    the divisor is a plain number; or there is no source.
    """
    raised_at = error.__traceback__
    while raised_at is not None and raised_at.tb_next is not None:
        raised_at = raised_at.tb_next
    if raised_at is None or raised_at.tb_frame.f_code is not code:
        return ""
    expression = _expression_at(raised_at)
    # ``a / b`` and ``a /= b``.
    if isinstance(expression, ast.BinOp):
        divisor = expression.right
    elif isinstance(expression, ast.AugAssign):
        divisor = expression.value
    else:
        return ""
    if not isinstance(expression.op, _DIVISIONS) or isinstance(divisor, ast.Constant):
        return ""
    return shortened(ast.unparse(divisor), 60)


def _expression_at(raised_at: TracebackType) -> ast.AST | None:
    """The expression (or ``a /= b``) whose instruction raised the error."""
    code = raised_at.tb_frame.f_code
    # Two bytes for each instruction, and a position for each: line, end line, column, end column.
    position = next(islice(code.co_positions(), raised_at.tb_lasti // 2, None))
    linecache.checkcache(code.co_filename)  # a file may have been changed since it was read
    source = "".join(linecache.getlines(code.co_filename, raised_at.tb_frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.BinOp, ast.AugAssign)):
            continue
        of_node = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
        if of_node == position:
            return node
    return None
