"""The MCP face, over stdio and HTTP. A tool call is decoded, attended to by a desk, and encoded for a model.

tools       what can be called: each tool is the struct of its arguments
protocol    tools listed, calls decoded, answers encoded, whatever it goes over
desk        one client's session, tool by tool
answers     what a model is told
files       a committed file as a model can take it
names       how a client that comes back finds its session
progress    what a client hears while code runs
stdio streams           `holdfast mcp`; its end of stdin and stdout
http late               the application at /mcp; loaded when somebody first asks for it

In here, `mcp` itself is the SDK.
"""
