-- Statements that bring a database of an older version to that of schema.sql, by version; the service runs what is missing when it starts.

-- version 2: limits of pools, enrolment tokens for one machine, recipes of machines, curves of jobs
alter table pool add max_machines int not null default 1000, add max_per_address int not null default 20, add one_use boolean not null default false;
create table enrolment (
    token_hash      bytea primary key,
    pool            text not null references pool,
    created         timestamptz not null default now(),
    used            timestamptz
);
create index enrolment_by_pool on enrolment (pool) where used is null;
create table recipe (
    name            text primary key,
    sha256          text not null
);
alter table node add version text not null default '', add recipes jsonb not null default '{}';
alter table session add address text not null default '';
create index session_by_address on session (address);
alter table job add curve jsonb not null default '[]';
update job set recipe = regexp_replace(recipe, '^yamls/', '') where recipe like 'yamls/%';
update attempt set recipe = regexp_replace(recipe, '^yamls/', '') where recipe like 'yamls/%';
drop index job_queued;
create index job_queued on job (owner, recipe, gpu_gb, (coalesce(image, '')), trusted, (epoch > 0) desc, priority desc, number)
    where state = 'queued';
create index job_by_group on job ((spec ->> 'group'), number) where spec ->> 'group' is not null;
create index ban_of_node on ban (node);
