/*
 * The life of one job: two workers that may stall or die at any point, their heartbeats,
 * the passes, the clock and one operator, over one database. README.md says what is left out.
 *
 * Each move of states.MOVES is an inline `move_NAME`. A move is one conditional write: it is
 * atomic, needs the row's lock, and judges the row once it has it. A transaction that stays
 * open (a handler's, an operator's) holds the lock from one step to a later one; its writes
 * are seen at its commit, so the model makes them there.
 *
 * Stalling needs no code: between two steps of a process the others may take any number.
 */

#define WORKERS 2

#ifndef MAX_ATTEMPTS
#define MAX_ATTEMPTS 3
#endif
#ifndef GRANTS
#define GRANTS 2 /* executions that shutdowns and an operator may grant */
#endif
/*
 * Unbounded, what may happen may happen again without end. BOUNDED takes away what goes round
 * in a circle (the operator's transactions and the claims given back are counted, a handler
 * reports no second time, nobody renews): then every run must end, and end well.
 */
#ifdef BOUNDED
#define OPERATIONS 2
#define CHURN 2
byte operations = OPERATIONS, churn = CHURN;
#define MAY_OPERATE (operations > 0)
#define MAY_CHURN (churn > 0)
#define SPEND(budget) budget--
#define GO_ON report
#else
#define MAY_OPERATE true
#define MAY_CHURN true
#define SPEND(budget) skip
#define GO_ON handler
#endif

mtype = { SCHEDULED, QUEUED, RUNNING, BLOCKED, SUCCEEDED, FAILED, CANCELLED, INTERRUPTED }
mtype = { NONE, OPEN, ENDED, SUCCESS } /* an attempt's row: absent, running, ended */

#define ENDS_WITH(s) (s == SUCCEEDED || s == FAILED || s == CANCELLED || s == INTERRUPTED)
#define TERMINAL ENDS_WITH(status)
#define LEFT(extra) (attempt_count < MAX_ATTEMPTS + granted + extra)

/*
 * A token is compared only with the row's own, which is the newest or null, never with another
 * remembered one. So two values are exact: the token of the newest claim, and any older one.
 */
#define NEWEST 1
#define OLDER 2

/* The job's row. */
mtype status = QUEUED;
byte token;                /* lease_token: 0 for null */
bool lease_live;           /* lease_expires_at lies ahead */
byte attempt_count, granted;
bool cancel_requested, finished /* finished_at */, corrupt /* blocked_reason */;
bool retry_on_interrupt;
bool business;             /* what a handler wrote beside complete() */

/* Its attempts: the row of the newest claim, and how many older rows there are, all ended. */
mtype attempt = NONE;
byte history;

/* The row's lock: a worker's transaction, the operator's, or nobody's. */
#define FREE 0
#define OPERATOR (WORKERS + 1)
byte row_lock = FREE;

/* What the processes remember, right or stale. */
byte held[WORKERS];        /* the token of each worker */
byte renewing[WORKERS];    /* the token that its heartbeat is about to renew */
byte vouched;              /* the token that the operator read on a page */

/* The judge's own book: the token whose lease is valid, 0 for none. No process reads it. */
byte valid;

/* The test writes moves.h from states.MOVES: where each move may start and end. */
#ifdef TABLE
#include "moves.h"
#define MADE(name, to) assert(FROM_##name); enter(to); assert(INTO_##name)
#else
#define MADE(name, to) enter(to)
#endif

inline enter(to)
{
    status = to;
    assert(!finished || !TERMINAL); /* one terminal outcome */
    finished = finished || TERMINAL
}

/* Safety, judged after every write. */
inline audit()
{
    /* One owner of a valid lease. */
    assert(valid == (lease_live -> token : 0));
    assert((status == RUNNING) == (token == NEWEST));
    /* History complete: a row for each execution; one is open exactly while the job runs. */
    assert(attempt_count == history + (attempt != NONE));
    assert((attempt == OPEN) == (status == RUNNING));
    assert(attempt_count <= MAX_ATTEMPTS + granted);
    /* One terminal outcome; business writes and success together or not at all. */
    assert(finished == TERMINAL);
    assert((attempt == SUCCESS) == (status == SUCCEEDED));
    assert(!business || status == SUCCEEDED);
    /* What waits can be claimed: nothing else would ever end it. */
    assert(status == RUNNING || TERMINAL || (LEFT(0) && !cancel_requested));
    /* A cancel that came first wins. */
    assert(!cancel_requested || status == RUNNING || status == CANCELLED)
}

/* The fence (CONTRACT 3.2): this job, this token, running, and a lease that has not expired. */
#define RUNS(t) (status == RUNNING && token == t)
#define OWNS(t) (RUNS(t) && lease_live)

inline accepted(t) { assert(t == valid) } /* no stale write */
inline refused(t) { assert(t != valid) }  /* nobody is told that a lease is lost which is not */

inline no_lease() { token = 0; lease_live = false }
inline close(how) { assert(attempt == OPEN); attempt = how }
inline undo_claim() { assert(attempt == OPEN); attempt = NONE; attempt_count-- }
inline never_began() { undo_claim(); no_lease(); valid = 0 }

/* ------------------------------------------------------------------ a worker's moves */

#define CLAIMABLE (status == QUEUED && !cancel_requested && LEFT(0) && row_lock == FREE)

#define AGED(t) (t == 0 -> 0 : OLDER)

inline move_claim()
{
    assert(valid == 0 && attempt != OPEN); /* one owner of a valid lease */
    history = history + (attempt != NONE);
    held[0] = AGED(held[0]); held[1] = AGED(held[1]);
    renewing[0] = AGED(renewing[0]); renewing[1] = AGED(renewing[1]);
    vouched = AGED(vouched);
    held[me] = NEWEST; token = NEWEST; valid = NEWEST; attempt = OPEN;
    lease_live = true;
    attempt_count++;
    MADE(claim, RUNNING);
    audit()
}

inline move_renew(t)
{
    accepted(t);
    lease_live = true;
    MADE(renew, RUNNING);
    audit()
}

/* The value that they write is nobody else's concern: only who may write matters here. */
inline move_progress(t) { accepted(t); MADE(progress, RUNNING) }
inline move_checkpoint(t) { accepted(t); MADE(checkpoint, RUNNING) }

inline move_give_back(t)
{
    accepted(t);
    never_began();
    if
    :: cancel_requested -> MADE(give_back, CANCELLED)
    :: else -> MADE(give_back, QUEUED)
    fi;
    audit()
}

inline move_block_claimed(t)
{
    accepted(t);
    never_began();
    if
    :: cancel_requested -> MADE(block_claimed, CANCELLED)
    :: else -> MADE(block_claimed, BLOCKED); corrupt = true
    fi;
    audit()
}

/* `stood_not` says that a completion was rolled back, which is a failure. */
inline move_finish(t, stood_not)
{
    accepted(t);
    no_lease(); valid = 0;
    if
#ifndef FAULT_FINISH_IGNORES_CANCEL
    :: cancel_requested -> close(ENDED); MADE(finish, CANCELLED)
    :: else ->
#else
    :: true ->
#endif
        if
        :: !stood_not -> close(SUCCESS); MADE(finish, SUCCEEDED)
        :: LEFT(0) -> close(ENDED); MADE(finish, SCHEDULED)
        :: close(ENDED); MADE(finish, FAILED)
        :: granted < GRANTS && retry_on_interrupt -> /* stopped by the worker */
            close(ENDED); granted++; MADE(finish, QUEUED)
        :: !retry_on_interrupt -> close(ENDED); MADE(finish, INTERRUPTED)
        fi
    fi;
    audit()
}

/* At the commit: the fence was passed earlier in this transaction, which holds the lock. */
inline move_complete(t)
{
    assert(RUNS(t)); /* nobody took the job over in between: no stale write */
    close(SUCCESS); no_lease(); valid = 0;
    business = true;
    MADE(complete, SUCCEEDED);
    audit()
}

/* ------------------------------------------------------------------ the passes' moves */

inline move_promote() { MADE(promote, QUEUED); audit() }
inline move_block() { corrupt = false; MADE(block, BLOCKED); audit() }

inline move_release()
{
    corrupt = false;
    if /* due, or not yet */
    :: MADE(release, QUEUED)
    :: MADE(release, SCHEDULED)
    fi;
    audit()
}

/* Books nothing in `valid`: what a pass takes must have expired by itself. */
inline move_recover(requeue, end)
{
#ifdef FAULT_LOSS_IS_FREE
    undo_claim();
#else
    close(ENDED);
#endif
#ifdef FAULT_RECOVER_IN_TWO
    audit();
#endif
    no_lease();
    if
    :: cancel_requested -> MADE(recover, CANCELLED)
    :: !cancel_requested && requeue && LEFT(0) -> MADE(recover, QUEUED)
    :: !cancel_requested && (end || !LEFT(0)) -> MADE(recover, INTERRUPTED)
    fi;
    audit()
}

/* ------------------------------------------------------------------ the operator's moves */

inline move_cancel() { corrupt = false; cancel_requested = true; MADE(cancel, CANCELLED); audit() }
inline move_request_cancel() { cancel_requested = true; MADE(request_cancel, RUNNING); audit() }

inline move_retry(extra)
{
    granted = granted + extra;
    finished = false; cancel_requested = false;
    MADE(retry, QUEUED);
    audit()
}

/* ------------------------------------------------------------------ the processes */

inline submit()
{
    if
    :: status = QUEUED
    :: status = SCHEDULED
    fi;
    if
    :: retry_on_interrupt = true
    :: retry_on_interrupt = false
    fi;
    audit()
}

/* A transaction that ends without a commit leaves nothing but a free lock. */
inline roll_back() { row_lock = (row_lock == me + 1 -> FREE : row_lock) }

/* The process dies, or forgets what it held; the next one in its place starts idle. */
inline die() { roll_back(); held[me] = 0 }

/* A statement of the holder, which waits for the row's lock and then reads the clock. */
#ifdef FAULT_CLOCK_BEFORE_LOCK
#define READ_CLOCK live = lease_live;
#define FENCED (RUNS(held[me]) && live)
#else
#define READ_CLOCK
#define FENCED OWNS(held[me])
#endif
#ifdef FAULT_FENCE_WITHOUT_LOCK
#define HOLD_LOCK skip
#else
#define HOLD_LOCK row_lock = me + 1
#endif
#ifdef FAULT_FINISH_WITHOUT_TOKEN
#define FINISH_FENCED (status == RUNNING && lease_live)
#else
#define FINISH_FENCED FENCED
#endif
#ifdef FAULT_RENEW_WITHOUT_LEASE
#define RENEWABLE RUNS(renewing[me])
#else
#define RENEWABLE OWNS(renewing[me])
#endif
#ifdef FAULT_BUSY_IS_LOST
#define STILL_OWNED false
#else
#define STILL_OWNED OWNS(held[me])
#endif
#define COMPLETION_STOOD (held[me] == NEWEST && attempt == SUCCESS)
#define MINE_OR_FREE (row_lock == FREE || row_lock == me + 1)

proctype worker(byte me)
{
    bool rolled_back;
#ifdef FAULT_CLOCK_BEFORE_LOCK
    bool live;
#endif

end_idle:
    atomic { CLAIMABLE -> move_claim() }

    if
    :: atomic { row_lock == FREE && MAY_CHURN -> /* cannot be dispatched, or the worker stops */
            if
            :: OWNS(held[me]) -> SPEND(churn);
                if
                :: move_give_back(held[me])
                :: move_block_claimed(held[me])
                fi
            :: else -> refused(held[me])
            fi;
            held[me] = 0; goto end_idle
        }
    :: goto handler
    :: atomic { true -> die(); goto end_idle }
    fi;

handler: /* one that swallows LeaseLost goes on with its stale token */
    if
    :: READ_CLOCK
        atomic { row_lock == FREE ->
            if
            :: FENCED && !cancel_requested -> move_progress(held[me]); goto GO_ON
            :: FENCED && cancel_requested -> goto report /* JobCancelled */
            :: else -> refused(held[me]); goto report
            fi
        }
    :: READ_CLOCK
        atomic { row_lock == FREE ->
            if
            :: FENCED -> move_checkpoint(held[me]); goto GO_ON
            :: else -> refused(held[me]); goto report
            fi
        }
    :: READ_CLOCK
        atomic { row_lock == FREE -> /* fence() */
            if
            :: FENCED -> accepted(held[me]); HOLD_LOCK; goto fenced
            :: else -> refused(held[me]); goto report
            fi
        }
    :: goto complete
    :: goto report
    :: atomic { true -> die(); goto end_idle }
    fi;

fenced: /* inside the handler's transaction, which has proved its ownership */
    if
    :: atomic { true -> /* commits: the attempt was the owner all the time */
            assert(RUNS(held[me])); roll_back(); goto GO_ON
        }
    :: goto complete
    :: atomic { true -> roll_back(); goto GO_ON }
    :: atomic { true -> die(); goto end_idle }
    fi;

complete: /* inside the handler's transaction, with business writes in it */
#ifndef FAULT_COMPLETE_WITHOUT_FENCE
    READ_CLOCK
    atomic { MINE_OR_FREE ->
        if
        :: FENCED && !cancel_requested -> accepted(held[me]); HOLD_LOCK
        :: FENCED && cancel_requested -> roll_back(); goto report /* JobCancelled */
        :: else -> refused(held[me]); roll_back(); goto report
        fi
    }
#endif
    if
    :: atomic { MINE_OR_FREE -> move_complete(held[me]); row_lock = FREE }
    :: atomic { true -> roll_back() }
    :: atomic { true -> die(); goto end_idle }
    fi;

    /* The handler has ended; whether the completion stood is read from the rows. */
    if
    :: atomic { COMPLETION_STOOD -> held[me] = 0; goto end_idle }
    :: atomic { !COMPLETION_STOOD -> rolled_back = true }
    fi;

report: /* the finisher: what is missing from the answer of a group is not yet lost */
    READ_CLOCK
    if
    :: atomic { row_lock == FREE ->
            if
            :: FINISH_FENCED ->
                move_finish(held[me], rolled_back);
                if
                :: goto report /* the answer was lost on the way: it tries again */
                :: rolled_back = false; held[me] = 0; goto end_idle
                fi
            :: else -> refused(held[me]); rolled_back = false; held[me] = 0; goto end_idle
            fi
        }
    :: atomic { row_lock != FREE && !STILL_OWNED ->
            refused(held[me]); rolled_back = false; held[me] = 0; goto end_idle
        }
    :: atomic { true -> die(); rolled_back = false; goto end_idle }
    fi
}

/* On a connection of its own: the token may be stale when it comes to it. */
proctype heartbeat(byte me)
{
end:
    do
    :: atomic { held[me] != 0 -> renewing[me] = held[me] }
        atomic {
            if
            :: row_lock == FREE && RENEWABLE -> move_renew(renewing[me])
            :: row_lock == FREE && !RENEWABLE -> refused(renewing[me])
            :: row_lock != FREE && OWNS(renewing[me]) /* busy: missed, not lost */
            :: row_lock != FREE && !OWNS(renewing[me]) -> refused(renewing[me])
            fi;
            renewing[me] = 0
        }
    od
}

#ifdef FAULT_RECOVER_WITHOUT_EXPIRY
#define EXPIRED (status == RUNNING && token != 0)
#else
#define EXPIRED (status == RUNNING && token != 0 && !lease_live)
#endif

/* Any number of passes: each step locks the row, judges it and writes. */
proctype passes()
{
end:
    do
    :: atomic { status == SCHEDULED && row_lock == FREE -> move_promote() }
    :: atomic { status == QUEUED && row_lock == FREE && MAY_CHURN -> SPEND(churn); move_block() }
    :: atomic { status == BLOCKED && !corrupt && row_lock == FREE -> move_release() }
#ifndef FAULT_NO_RECOVERY
    :: atomic { EXPIRED && row_lock == FREE ->
            move_recover(retry_on_interrupt, !retry_on_interrupt)
        }
#endif
    od
}

proctype clock()
{
end:
    do
    :: atomic { lease_live -> lease_live = false; valid = 0; audit() }
    od
}

/* Each operation is a transaction of its own: lock, judge, write, commit or roll back. */
proctype operator()
{
end:
    do
    :: atomic { MAY_OPERATE && vouched == 0 && token != 0 -> vouched = token }
    :: atomic { MAY_OPERATE && row_lock == FREE -> SPEND(operations); row_lock = OPERATOR }
        atomic {
            if
            :: skip /* rolled back */
            :: status == SCHEDULED || status == QUEUED || status == BLOCKED -> move_cancel()
            :: status == RUNNING -> move_request_cancel()
            :: TERMINAL && status != SUCCEEDED && LEFT(0) -> move_retry(0)
            :: TERMINAL && status != SUCCEEDED && LEFT(1) && granted < GRANTS -> move_retry(1)
            :: status == BLOCKED -> move_release()
#ifndef FAULT_NO_RECOVERY
            :: RUNS(vouched) -> /* says that the attempt is dead, perhaps wrongly */
                lease_live = false; valid = 0;
                move_recover(true, true)
#endif
            fi;
            vouched = 0;
            row_lock = FREE
        }
    od
}

/* No stuck state: where nothing can happen any more, the job has ended or is blocked. */
#define SETTLED (TERMINAL || status == BLOCKED)

proctype life()
{
    do
    :: SETTLED ->
end_settled:
        !SETTLED
    od
}

init
{
    atomic {
        submit();
        run worker(0); run worker(1);
#ifndef BOUNDED
        run heartbeat(0); run heartbeat(1);
#endif
        run passes(); run clock(); run operator(); run life()
    }
}
