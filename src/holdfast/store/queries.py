"""Every piece of SQL, by name.

Runs and records have integer keys that only grow: a commit appends to the end of its tables, and costs the same after
a hundred thousand runs as after one. What is looked up by more than one thing has an index for each.
"""

FORMAT = 1
"""`user_version` of the file."""

# `body` is always the msgpack of the noun that the table is named after; columns beside it are those we search by.
SCHEMA = """
create table sessions (
    id text primary key,
    body blob not null
) strict, without rowid;

-- One row for each run, so that the end of its records is known without reading them.
create table runs (
    key integer primary key,
    id text not null unique,
    session text not null,
    last text not null              -- tag of its last record
) strict;
create index runs_of_session on runs (session);
-- Holds the few that are open: start-up does not read the history to find them.
create index runs_unsettled on runs (session) where last <> 'Settled';

create table records (
    key integer primary key,
    run integer not null,           -- runs.key
    body blob not null
) strict;
create index records_of_run on records (run);

create table receipts (
    key integer primary key,
    session text not null,
    number integer not null,
    run text not null,
    sha256 text not null,
    envelope blob not null,
    unique (session, number)
) strict;
create index receipts_of_run on receipts (run);

create table versions (
    session text not null,
    version integer not null,
    body blob not null,
    primary key (session, version)
) strict, without rowid;

-- The files of each session's current version.
create table files (
    session text not null,
    path text not null,
    sha256 text not null,
    bytes integer not null,
    primary key (session, path)
) strict, without rowid;

create table names (
    session text not null,
    name text not null,
    body blob not null,
    primary key (session, name)
) strict, without rowid;

create table keys (
    session text not null,
    key text not null,
    body blob not null,
    primary key (session, key)
) strict, without rowid;

-- A table with a rowid: results may be large.
create table results (
    run text not null unique,
    session text not null,
    body blob not null
) strict;
create index results_of_session on results (session);

create table losses (
    key integer primary key,
    session text not null,
    body blob not null
) strict;
create index losses_of_session on losses (session);
"""

# -- runs and their records --------------------------------------------------------------------------------------

FIND_RUN = "select key, session, last from runs where id = ?"
OPEN_RUN = "insert into runs (id, session, last) values (?, ?, ?)"
ADVANCE_RUN = "update runs set last = ? where key = ?"
ADD_RECORD = "insert into records (run, body) values (?, ?)"
RECORDS_OF_RUN = """
    select records.body from records join runs on runs.key = records.run where runs.id = ? order by records.key
"""
# The order of `Planned` is that of the keys. A limit of -1 is none.
RUNS_OF_SESSION = "select id from runs where session = ? order by key limit ?"
RUNS_OF_SESSION_NEWEST_FIRST = "select id from runs where session = ? order by key desc limit ?"
UNSETTLED = "select session, id from runs where last <> 'Settled' order by key"
UNSETTLED_OF_SESSION = "select session, id from runs where last <> 'Settled' and session = ? order by key"

LAST_RECORD = "select max(key) from records"

# -- sessions ----------------------------------------------------------------------------------------------------

PUT_SESSION = "insert into sessions (id, body) values (?, ?) on conflict do update set body = excluded.body"
SESSION = "select body from sessions where id = ?"
SESSIONS = "select body from sessions"
# The records before the runs that they are found by.
DROP_SESSION = (
    "delete from records where run in (select key from runs where session = ?)",
    "delete from runs where session = ?",
    "delete from receipts where session = ?",
    "delete from versions where session = ?",
    "delete from files where session = ?",
    "delete from names where session = ?",
    "delete from keys where session = ?",
    "delete from results where session = ?",
    "delete from losses where session = ?",
    "delete from sessions where id = ?",
)
# Keys of records only grow (`accidents`): a record of no run keeps the place of the last one when that is deleted.
DROP_PLACEHOLDER = "delete from records where run = 0"
KEEP_PLACE = "insert or ignore into records (key, run, body) values (?, 0, x'')"

# -- what runs leave ---------------------------------------------------------------------------------------------

# A receipt never replaces another: a number that is taken is an error.
ADD_RECEIPT = "insert into receipts (session, number, run, sha256, envelope) values (?, ?, ?, ?, ?)"
RECEIPTS_OF_SESSION = """
    select session, number, run, sha256, envelope from receipts where session = ? order by number
"""
RECEIPTS_OF_RUN = "select session, number, run, sha256, envelope from receipts where run = ? order by number"

# Put again when a reset moves the current version to a new generation.
PUT_VERSION = """
    insert into versions (session, version, body) values (?, ?, ?) on conflict do update set body = excluded.body
"""
VERSION = "select body from versions where session = ? and version = ?"
VERSIONS_NEWEST_FIRST = "select body from versions where session = ? order by version desc limit ?"

PUT_FILE = """
    insert into files (session, path, sha256, bytes) values (?, ?, ?, ?)
    on conflict do update set sha256 = excluded.sha256, bytes = excluded.bytes
"""
DROP_FILE = "delete from files where session = ? and path = ?"
FILES = "select path, sha256, bytes from files where session = ? order by path"

PUT_NAME = "insert into names (session, name, body) values (?, ?, ?) on conflict do update set body = excluded.body"
DROP_NAME = "delete from names where session = ? and name = ?"
NAMES = "select name, body from names where session = ? order by name"

PUT_KEY = "insert into keys (session, key, body) values (?, ?, ?) on conflict do update set body = excluded.body"
KEYS = "select key, body from keys where session = ? order by key"
KEY = "select body from keys where session = ? and key = ?"

PUT_RESULT = "insert into results (run, session, body) values (?, ?, ?) on conflict do update set body = excluded.body"
RESULT = "select body from results where run = ?"
RESULTS_OF_SESSION = "select run from results where session = ? order by rowid"
RESULT_BYTES = "select length(body) from results where run = ? and session = ?"
DROP_RESULT = "delete from results where run = ? and session = ?"
# The primary key leads to them; which of them are calls is looked at more closely.
CALLS = "select key, body from keys where session = ? and key >= 'call-' and key < 'call.'"

ADD_LOSS = "insert into losses (session, body) values (?, ?)"
LOSSES = "select body from losses where session = ? order by key"
