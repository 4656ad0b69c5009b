-- What a fleet remembers. All times are the database's; no clock of another machine is ever stored.
-- `fleet init` runs this file in an empty database. A database of an older version becomes this one by upgrades.sql, which changes with this file.

create table fleet_version (version int not null);
insert into fleet_version values (2);

-- Who submits. Tokens are 32 random bytes, of which only the SHA-256 is kept.
create table owner (
    name            text primary key,
    token_hash      bytea not null unique,
    is_operator     boolean not null default false,      -- sees and does everything
    max_leased      int not null default 20,             -- jobs on machines at a time
    max_queued      int not null default 10000,          -- that wait
    budget_dollars  double precision not null default 10,
    spent_dollars   double precision not null default 0, -- by attempts that have ended; changes in the transaction that ends one
    last_leased     timestamptz not null default '-infinity', -- when it last got a lease
    notice_key      bytea not null,                      -- signs what its webhooks are told
    created         timestamptz not null default now()
);

-- Machines that share an enrolment token, a price and whether they are trusted.
create table pool (
    name            text primary key,
    token_hash      bytea not null unique,
    price_per_hour  double precision not null,
    trusted         boolean not null default false,
    created         timestamptz not null default now(),
    max_machines    int not null default 1000,           -- that are here at a time
    max_per_address int not null default 20,             -- of them from one address, those in quarantine too
    one_use         boolean not null default false       -- machines enrol with tokens of their own alone, not with the pool's
);

-- Enrolment tokens that let in one machine, once.
create table enrolment (
    token_hash      bytea primary key,
    pool            text not null references pool,
    created         timestamptz not null default now(),
    used            timestamptz                          -- when a machine enrolled with it
);
create index enrolment_by_pool on enrolment (pool) where used is null;

-- Recipes of the service that started last, by name, and what they say (jobs/checking.py): a machine gets jobs of those that it has as they are here.
create table recipe (
    name            text primary key,
    sha256          text not null
);

-- A machine, by the name that it gives itself.
create table node (
    name            text primary key,
    pool            text not null references pool,
    state           text not null default 'live' check (state in ('live', 'draining', 'quarantined', 'gone')),
    reason          text not null default '',            -- why it is draining or quarantined
    gpu             text not null,
    gpu_gb          double precision not null,
    num_gpus        int not null default 1,
    image           text not null default '',
    judged_from     timestamptz not null default '-infinity', -- failures before count no more: readmitted by a person
    first_seen      timestamptz not null default now(),
    last_seen       timestamptz not null default now(),
    version         text not null default '',            -- of its installation, as it says
    recipes         jsonb not null default '{}'          -- {name: sha256}, as it says
);

-- One stay of a node: from the start of a worker to its end. Its token is the node's only secret, and lets it in again.
create table session (
    id              bigint generated always as identity primary key,
    node            text not null references node,
    token_hash      bytea not null unique,
    price_per_hour  double precision not null,
    started         timestamptz not null default now(),
    last_seen       timestamptz not null default now(),
    ended           timestamptz,
    address         text not null default ''             -- from which it enrolled
);
create unique index session_of_node on session (node) where ended is null;
create index session_by_time on session (last_seen);
create index session_by_address on session (address);

create table job (
    id              uuid primary key default gen_random_uuid(),
    number          bigint generated always as identity unique, -- order of submission
    owner           text not null references owner,
    kind            text not null default 'train' check (kind in ('train', 'sample')),
    parent          uuid references job,                 -- whose result a job of kind `sample` draws with
    name            text,
    recipe          text not null,
    spec            jsonb not null,
    num_steps       int not null default 0,              -- 0: the recipe counts otherwise
    gpu_gb          double precision not null default 0, -- what it needs, from the spec
    image           text,
    trusted         boolean not null default false,
    priority        int not null default 0,
    state           text not null default 'queued' check (state in ('queued', 'leased', 'done', 'failed', 'cancelled')),
    not_before      timestamptz not null default now(),
    epoch           int not null default 0,              -- of its newest attempt: the fencing token
    counted_from    int not null default 0,              -- attempts up to this epoch count no more: `retry` by a person
    node            text references node,                -- that holds the lease
    lease_until     timestamptz,
    step            int not null default 0,              -- of its checkpoint
    checkpoint      jsonb,                               -- {epoch, step, files: {name: {sha256, bytes}}}
    results         jsonb,                               -- {epoch, files: {name: {sha256, bytes}}}
    cause           text not null default '',            -- why it failed, for its owner
    created         timestamptz not null default now(),
    ended           timestamptz,
    curve           jsonb not null default '[]',         -- [[step, loss, learning rate, steps/s], ...], thinned out (queue/leases.py)
    check ((state = 'leased') = (node is not null and lease_until is not null)),
    check ((state in ('done', 'failed', 'cancelled')) = (ended is not null))
);
-- By lanes (queue/leases.py), and in each the order of hand-out within an owner (policies/hand_out.py).
create index job_queued on job (owner, recipe, gpu_gb, (coalesce(image, '')), trusted, (epoch > 0) desc, priority desc, number)
    where state = 'queued';
create index job_leased on job (lease_until) where state = 'leased';
create index job_leased_of_owner on job (owner) where state = 'leased';
create index job_by_owner on job (owner, state, number);
create index job_by_group on job ((spec ->> 'group'), number) where spec ->> 'group' is not null;
create index job_ended on job (ended) where ended is not null;
create index job_parent on job (parent) where parent is not null;

create table attempt (
    job             uuid not null references job,
    epoch           int not null,
    node            text not null references node,
    session         bigint not null references session,
    gpu             text not null,
    recipe          text not null,
    price_per_hour  double precision not null,
    started         timestamptz not null default now(),
    last_sign       timestamptz not null default now(),  -- claim, renewal, publication or end: what is billed ends here
    progressed      timestamptz,                         -- first sign of a step: what came before is the start
    first_step      int not null,
    last_step       int not null,
    steps_per_sec   double precision,
    dollars         double precision generated always as (extract(epoch from last_sign - started)::float8 / 3600 * price_per_hour) stored,
    ended           timestamptz,
    ending          text,
    exit_code       int,
    message         text not null default '',
    primary key (job, epoch)
);
create unique index attempt_running on attempt (job) where ended is null;
create index attempt_of_node on attempt (node, started);
create index attempt_of_session on attempt (session);
create index attempt_by_pace on attempt (recipe, gpu, started) where steps_per_sec is not null;

create table ban (
    job             uuid not null references job on delete cascade,
    node            text not null references node,
    since           timestamptz not null default now(),
    until           timestamptz not null,
    reason          text not null,
    primary key (job, node)
);
create index ban_of_node on ban (node);

-- One submission an owner's key: said twice, it is one.
create table submission (
    owner           text not null references owner,
    key             text not null,
    body_sha256     bytea not null,
    jobs            uuid[] not null,
    created         timestamptz not null default now(),
    primary key (owner, key)
);

-- What webhooks have to be told; a row is written in the transaction that ends the job.
create table notice (
    id              uuid primary key default gen_random_uuid(),
    job             uuid not null references job,
    url             text not null,
    body            text not null,
    tries           int not null default 0,
    next_try        timestamptz not null default now(),
    created         timestamptz not null default now(),
    delivered       timestamptz,
    last_error      text not null default ''
);
create index notice_due on notice (next_try) where delivered is null;
