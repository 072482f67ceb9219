"""The one way out of a session: an HTTP proxy of the host's, for the hosts that the user listed.

A guest has no network. With `egress=[...]` one socket listens inside its network namespace, and this package answers
there, in the host: it looks at what is asked for, has it written down, and only then lets it out.

    allowed   which hosts and ports were listed
    names     how hosts are written, in one spelling each
    addresses which addresses a name may have; lookups
    log       what is said about each attempt
    hello     whom the first bytes of a TLS connection are meant for
    answers   what the guest is told
    wire      one connection, with bounded patience
    heads     requests read strictly, and put together anew
    gate      listed, public, written down; then connected
    plain     `GET http://...`
    tunnels   `CONNECT host:443`
    exchange  one connection of a guest's, from first to last
    proxy     accepting, while a run goes on and at no other time

All that comes from a guest is hostile, and what comes from outside is not trusted either. Nothing here knows of
sessions, journal or kernels.
"""
