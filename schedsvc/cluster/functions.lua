#!lua name=schedsvc
-- The functions of the store. `schedsvc cluster init` loads them; a member refuses a store whose
-- functions have another version than FUNCTIONS_VERSION in library.py.
--
-- Numbers in Lua are doubles: 2^53 + 1 comes back as 2^53. So nothing here calculates with totals;
-- they are texts that members add up. Change numbers and times stay far below 2^53.
--
-- KEYS of every function, all with the hash tag of the cluster:
--   1 number   the change number, which grows with each call of schedsvc_sync
--   2 life     drawn when the store is empty; another one means that the store lost its data
--   3 index    sorted set: what changed last, by change number
--   4 rows     hash: the totals
--   5 minutes  sorted set: the change number of each of the last 61 minutes, by minute
--   6 members  hash: what each member said last, and when

local VERSION = '1'
local ROW_MINUTES = 60  -- so long a total is kept after its last change
local KEPT_MS = 7200000  -- and all of them, once no member is left
local PRUNED_MAX = 400
local TTL_MAX_MS = 18000  -- as no member asks for more
-- A value of `members`: the time (ms) at which the member counts as gone, its incarnation, the
-- number of its last call, the fingerprint of its configuration.
local MEMBER = '^(%d+) (%x+) (%d+) (%x*)$'

local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number)
    return string.format('%.0f', number)
end

local function version()
    return VERSION
end

-- Members and what they said last, by turns. What is due later than anything can be was written
-- before the clock was set back: it counts from now.
local function entries(keys, now)
    local all = redis.call('HGETALL', keys[6])
    for i = 1, #all, 2 do
        local due, rest = string.match(all[i + 1], '^(%d+)( .*)$')
        if due and tonumber(due) > now + TTL_MAX_MS then
            all[i + 1] = whole(now + TTL_MAX_MS) .. rest
            redis.call('HSET', keys[6], all[i], all[i + 1])
        end
    end
    return all
end

-- ARGV: member, incarnation, fingerprint, TTL in ms. Returns {what, of whom}.
local function join(keys, args)
    local now = now_ms()
    local all = entries(keys, now)
    for i = 1, #all, 2 do
        local due, incarnation, _, fingerprint = string.match(all[i + 1], MEMBER)
        if due == nil or tonumber(due) <= now then
            redis.call('HDEL', keys[6], all[i])
        elseif all[i] == args[1] and incarnation ~= args[2] then
            return {'name', whole(tonumber(due) - now)}
        elseif all[i] ~= args[1] and fingerprint ~= args[3] then
            return {'fingerprint', all[i]}
        end
    end
    local value = whole(now + args[4]) .. ' ' .. args[2] .. ' 0 ' .. args[3]
    redis.call('HSET', keys[6], args[1], value)
    return {'joined', ''}
end

-- ARGV: member, incarnation.
local function leave(keys, args)
    local mine = redis.call('HGET', keys[6], args[1])
    if mine and select(2, string.match(mine, MEMBER)) == args[2] then
        redis.call('HDEL', keys[6], args[1])
    end
    return 'left'
end

local function prune(keys, now, number)
    local minute = math.floor(now / 60000)
    if redis.call('ZCOUNT', keys[5], minute, minute) == 0 then
        redis.call('ZADD', keys[5], minute, minute .. ':' .. whole(number))
    end
    for i = 3, 5 do
        redis.call('PEXPIRE', keys[i], KEPT_MS)
    end
    local before = redis.call('ZRANGE', keys[5], '-inf', minute - ROW_MINUTES, 'BYSCORE')
    local newest = 0
    for _, entry in ipairs(before) do
        newest = math.max(newest, tonumber(string.match(entry, ':(%d+)$')))
    end
    if newest == 0 then
        return
    end
    local old = redis.call('ZRANGE', keys[3], '-inf', newest, 'BYSCORE', 'LIMIT', 0, PRUNED_MAX)
    for _, row in ipairs(old) do
        redis.call('ZREM', keys[3], row)
        redis.call('HDEL', keys[4], row)
    end
    if #old < PRUNED_MAX then
        redis.call('ZREMRANGEBYSCORE', keys[5], '-inf', minute - ROW_MINUTES)
    end
end

-- The names of the members that are alive, with spaces between them.
local function alive(keys, now)
    local names = {}
    local all = entries(keys, now)
    for i = 1, #all, 2 do
        local due = string.match(all[i + 1], MEMBER)
        if due and tonumber(due) > now then
            names[#names + 1] = all[i]
        end
    end
    table.sort(names)
    return table.concat(names, ' ')
end

-- Write totals that changed, and read those of others that changed after a number.
-- ARGV: member, incarnation, fingerprint, TTL in ms, number of this call, a random life, the number
-- read up to, the most rows to read, the prefix of the member's own rows, then row and totals by
-- turns. Returns {change number, life, number read up to, rows of others, members}: each row with
-- the sizes of row and totals before it, two bytes each. If another incarnation has the member's name, or
-- this call is older than one that came, it changes nothing and returns {'0'}.
local function sync(keys, args)
    local now = now_ms()
    local mine = redis.call('HGET', keys[6], args[1])
    if mine then
        local due, incarnation, call = string.match(mine, MEMBER)
        local same = incarnation == args[2]
        if (not same and tonumber(due) > now) or (same and tonumber(call) >= tonumber(args[5])) then
            return {'0'}
        end
    end
    local value = whole(now + args[4]) .. ' ' .. args[2] .. ' ' .. args[5] .. ' ' .. args[3]
    redis.call('HSET', keys[6], args[1], value)
    redis.call('SET', keys[2], args[6], 'NX')
    local number = redis.call('INCR', keys[1])
    for i = 10, #args, 2 do
        redis.call('HSET', keys[4], args[i], args[i + 1])
        redis.call('ZADD', keys[3], number, args[i])
    end
    if number % 16 == 0 then
        prune(keys, now, number)
    end
    local out = {whole(number), redis.call('GET', keys[2]), whole(number)}
    local limit = tonumber(args[8])
    local found = redis.call(
        'ZRANGE', keys[3], '(' .. args[7], '+inf', 'BYSCORE', 'LIMIT', 0, limit, 'WITHSCORES')
    local upto = number
    if #found == 2 * limit then
        -- More may follow: those of the last number are read again with the rest of it.
        upto = tonumber(found[#found])
        if tonumber(found[2]) < upto then
            upto = upto - 1
        end
    end
    out[3] = whole(upto)
    local own, rows = args[9], {}
    for i = 1, #found, 2 do
        if string.sub(found[i], 1, #own) ~= own then
            local totals = redis.call('HGET', keys[4], found[i]) or ''
            rows[#rows + 1] = struct.pack('>HH', #found[i], #totals) .. found[i] .. totals
        end
    end
    out[4] = table.concat(rows)
    out[5] = alive(keys, now)
    return out
end

-- Returns the change number and life, how many rows there are, the time in ms, then member and
-- value by turns.
local function status(keys)
    local out = {
        redis.call('GET', keys[1]) or '0', redis.call('GET', keys[2]) or '',
        whole(redis.call('HLEN', keys[4])), whole(now_ms()),
    }
    for _, part in ipairs(redis.call('HGETALL', keys[6])) do
        out[#out + 1] = part
    end
    return out
end

redis.register_function{
    function_name = 'schedsvc_version', callback = version, flags = {'no-writes'}}
redis.register_function('schedsvc_join', join)
redis.register_function('schedsvc_leave', leave)
redis.register_function('schedsvc_sync', sync)
redis.register_function{
    function_name = 'schedsvc_status', callback = status, flags = {'no-writes'}}
