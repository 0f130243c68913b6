-- Part of the library: which member leads a set.
--
-- The functions compare rows and never read them: a member seals and checks what a row says (see
-- signing.py). A row counts until another one replaces it, so a member that finds a forged row
-- names it as the one to replace.
--
-- KEYS of every function, all with the hash tag of the cluster:
--   1 hold      the row of the member that leads the set; it expires with the term
--   2 terms     hash: `counter`, the row of the highest term of the cluster; of each set the last
--               row, which does not expire, and `ended:` the last one that its leader released
--   3 standbys  hash: members that may take the next term, and until when they count

local TERM_MS = 2000
local NOTE_KEPT_MS = 604800000  -- a week

-- ARGV: set, member that may take the next term ('' for none), and for how many ms it counts.
-- Returns {hold, counter, last row of the set}, '' for what is missing, and 1 if the member did not
-- count before, else 0.
local function look(keys, args)
    local is_new = 0
    if args[2] ~= '' then
        is_new = redis.call('HSET', keys[3], args[2], whole(now_ms() + args[3]))
    end
    if redis.call('PTTL', keys[1]) > TERM_MS then
        redis.call('PEXPIRE', keys[1], TERM_MS)  -- the clock was set back since
    end
    return {
        redis.call('GET', keys[1]) or '', redis.call('HGET', keys[2], 'counter') or '',
        redis.call('HGET', keys[2], 'set:' .. args[1]) or '', is_new,
    }
end

-- ARGV: set, hold and counter as `look` returned them, the new ones, TTL in ms, the member.
-- Returns 'taken'; or 'changed' if another member was faster.
local function take(keys, args)
    local hold = redis.call('GET', keys[1]) or ''
    local counter = redis.call('HGET', keys[2], 'counter') or ''
    if hold ~= args[2] or counter ~= args[3] then
        return 'changed'
    end
    redis.call('SET', keys[1], args[4], 'PX', args[6])
    redis.call('HSET', keys[2], 'counter', args[5], 'set:' .. args[1], args[4])
    redis.call('HDEL', keys[3], args[7])
    return 'taken'
end

-- ARGV: set, own hold, own counter, TTL in ms, and a row to replace ('' for none).
-- Returns {'held', members that may take the next term, counter}, or {'other', row}: a call that
-- comes after its leader has released the term renews nothing.
local function renew(keys, args)
    local hold = redis.call('GET', keys[1])
    local last = redis.call('HGET', keys[2], 'set:' .. args[1])
    -- While the own key is missing, the last row of the set says whether another member led since.
    local found = hold or last or args[2]
    if found ~= args[2] and found ~= args[5] then
        return {'other', found}
    end
    if redis.call('HGET', keys[2], 'ended:' .. args[1]) == args[2] then
        return {'other', args[2]}
    end
    redis.call('SET', keys[1], args[2], 'PX', args[4])
    if last ~= args[2] then
        redis.call('HSET', keys[2], 'set:' .. args[1], args[2])
    end
    redis.call('HSETNX', keys[2], 'counter', args[3])
    local names, now = {}, now_ms()
    local all = redis.call('HGETALL', keys[3])
    for i = 1, #all, 2 do
        if tonumber(all[i + 1]) and tonumber(all[i + 1]) > now then
            names[#names + 1] = all[i]
        else
            redis.call('HDEL', keys[3], all[i])
        end
    end
    return {'held', table.concat(names, ' '), redis.call('HGET', keys[2], 'counter')}
end

-- ARGV: set, own hold. Ends the term, so that another member can take the next one at once.
local function release(keys, args)
    if redis.call('GET', keys[1]) == args[2] then
        redis.call('DEL', keys[1])
    end
    redis.call('HSET', keys[2], 'ended:' .. args[1], args[2])
    return 'released'
end

-- For people; no member decides by it.
-- KEYS: hash of the notes that the members of a set leave. ARGV: member, and its note.
local function note(keys, args)
    local now = now_ms()
    redis.call('HSET', keys[1], args[1], whole(now) .. ' ' .. args[2])
    local all = redis.call('HGETALL', keys[1])
    for i = 1, #all, 2 do
        local left = tonumber(string.match(all[i + 1], '^(%d+) '))
        if not left or left < now - NOTE_KEPT_MS then
            redis.call('HDEL', keys[1], all[i])
        end
    end
    return 'noted'
end

-- KEYS: as above, then the notes. ARGV: set. Returns the time in ms, hold, the last row of the set
-- ('' for what is missing), then member and note by turns.
local function show(keys, args)
    local out = {
        whole(now_ms()), redis.call('GET', keys[1]) or '',
        redis.call('HGET', keys[2], 'set:' .. args[1]) or '',
    }
    for _, part in ipairs(redis.call('HGETALL', keys[4])) do
        out[#out + 1] = part
    end
    return out
end

-- KEYS: the second one alone. Returns the names of the sets that have had a leader.
local function sets(keys)
    local out, all = {}, redis.call('HGETALL', keys[1])
    for i = 1, #all, 2 do
        out[#out + 1] = string.match(all[i], '^set:(.*)$')
    end
    return out
end

redis.register_function('schedsvc_term_look', look)
redis.register_function('schedsvc_term_take', take)
redis.register_function('schedsvc_term_renew', renew)
redis.register_function('schedsvc_term_release', release)
redis.register_function('schedsvc_set_note', note)
redis.register_function{
    function_name = 'schedsvc_set_show', callback = show, flags = {'no-writes'}}
redis.register_function{
    function_name = 'schedsvc_sets', callback = sets, flags = {'no-writes'}}
