"""`holdfast repl`: one session, cell by cell, from a terminal or from a pipe.

cells      where a cell ends
prompt     the line that is typed: history, completion, colours, what the prompt tells
commands   `:status` and the others: what is asked of us and not of Python
answers    `input()` of a cell, answered at the terminal
loop       one cell after the other, and the session around them
"""
