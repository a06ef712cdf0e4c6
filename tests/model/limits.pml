/*
 * The places of one concurrency key (CONTRACT 3.12): two claimers, two whose attempts end, and
 * where they may die after a commit, the pass. README.md says what is left out.
 *
 * What a transaction writes is seen at its commit, which is one step; what it reads is what had
 * been committed when its statement began. A claimer and an end only try the key's lock, so
 * what the one reads may be old by the time that it commits.
 */

#define JOBS 3
#ifndef PLACES
#define PLACES 1
#endif
#define NOBODY JOBS

mtype = { QUEUED, RUNNING, DONE }

mtype status[JOBS] = QUEUED;
bool waits[JOBS];  /* limit_waiting: out of the claim's index */
bool taken[JOBS];  /* the row's lock: a claimer has picked it, or its end is being written */
bool locked;       /* the key's lock */
byte running;

#define IN_CLAIMS(j) (status[j] == QUEUED && !waits[j])
#define ALL_DONE (status[0] == DONE && status[1] == DONE && status[2] == DONE)
#define COMING (IN_CLAIMS(0) + IN_CLAIMS(1) + IN_CLAIMS(2))

inline first_waiting(j)
{
    if
    :: waits[0] -> j = 0
    :: !waits[0] && waits[1] -> j = 1
    :: !waits[0] && !waits[1] && waits[2] -> j = 2
    :: !waits[0] && !waits[1] && !waits[2] -> j = NOBODY
    fi
}

inline let_in(j)
{
    if
    :: j != NOBODY -> waits[j] = false
    :: else
    fi
}

proctype claimer()
{
    byte mine, count;

end_idle:
    if
    :: atomic { IN_CLAIMS(0) && !taken[0] -> mine = 0; taken[0] = true }
    :: atomic { IN_CLAIMS(1) && !taken[1] -> mine = 1; taken[1] = true }
    :: atomic { IN_CLAIMS(2) && !taken[2] -> mine = 2; taken[2] = true }
    fi;
#ifdef FAULT_COUNT_WITH_LOCK
    count = running; /* the snapshot of the statement that then waits for the lock */
    atomic { !locked -> locked = true }
#else
#ifndef FAULT_NO_LOCK
    if
    :: atomic { !locked -> locked = true }
    :: atomic { locked -> taken[mine] = false; goto end_idle } /* left to a later claim */
    fi;
#endif
    count = running;
#endif
    if
    :: atomic { count < PLACES -> /* commits: it runs */
            status[mine] = RUNNING; running++;
            assert(running <= PLACES);
            taken[mine] = false; locked = false
        }
    :: atomic { count >= PLACES -> /* commits: it waits */
            waits[mine] = true; taken[mine] = false; locked = false
        }
    :: atomic { true -> taken[mine] = false; locked = false } /* dies: rolled back */
    fi;
    goto end_idle
}

/* Whatever ends attempts: a worker, or who recovers in its place. */
proctype ender()
{
    byte mine, next;
    bool has_key;

end_idle:
    if
    :: atomic { status[0] == RUNNING && !taken[0] -> mine = 0; taken[0] = true }
    :: atomic { status[1] == RUNNING && !taken[1] -> mine = 1; taken[1] = true }
    :: atomic { status[2] == RUNNING && !taken[2] -> mine = 2; taken[2] = true }
    fi;
#ifdef FAULT_LET_IN_WITHOUT_LOCK
    has_key = true;
#else
    if
    :: atomic { !locked -> locked = true; has_key = true }
    :: atomic { locked -> has_key = false }
    fi;
#endif
    next = NOBODY;
    if
    :: atomic { has_key -> first_waiting(next) }
    :: !has_key
    fi;
    atomic { /* commits */
        status[mine] = DONE; running--; taken[mine] = false;
        let_in(next);
#ifndef FAULT_LET_IN_WITHOUT_LOCK
        locked = (has_key -> false : locked)
#endif
    };
    if
    :: has_key
#ifndef FAULT_NOT_LATER
    :: atomic { !has_key && !locked -> locked = true };
        atomic { first_waiting(next); let_in(next); locked = false }
#else
    :: !has_key
#endif
#ifdef DIES
    :: !has_key /* dies after its commit */
#endif
    fi;
    goto end_idle
}

#ifdef DIES
#ifndef FAULT_NO_PASS
/* Without the lock: one let in too many is sent to wait again. */
proctype passes()
{
    byte next;
end:
    do
    :: atomic { (waits[0] || waits[1] || waits[2]) && running + COMING < PLACES ->
            first_waiting(next); let_in(next)
        }
    od
}
#endif
#endif

/* No lost wake-up: where nothing can happen any more, every job has run. */
proctype judge() { ALL_DONE }

init
{
    atomic {
        run claimer(); run claimer(); run ender(); run ender(); run judge();
#ifdef DIES
#ifndef FAULT_NO_PASS
        run passes()
#endif
#endif
    }
}
