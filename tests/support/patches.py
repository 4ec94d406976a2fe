"""Grammars of patches: as agents send it for a tool that edits files, and one of short texts."""

from __future__ import annotations

import re

PATCH_GRAMMAR = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
SHORT_GRAMMAR = r"""
start: "*** Begin" LF line{1,3} "*** End" LF?
line: ("+" | "-") /[a-c "\\<>|\/{}]{0,4}/ LF
%import common.LF
"""
SHORT = re.compile(r'\*\*\* Begin\n(?:[+-][a-c "\\<>|/{}]{0,4}\n){1,3}\*\*\* End\n?')
"""The texts of the short grammar."""
