"""The HTTP face. A handler decodes, calls one verb, encodes; the contract is `holdfast.api`.

app         the application: one table of operations, from which routes and OpenAPI come
operations  what an operation says of itself
hub         what this face knows beside the service: who may see what, what runs, what is held
sessions runs files     the handlers, by noun
running feeds           a run that goes on while clients come and go; its numbered events
life        what happens to a session, as it happens
bodies      structs from and to JSON and msgpack
openapi page            the description, for programs and for people
"""
