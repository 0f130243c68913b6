-- Part of the library: the members, and the totals of what they have served.
--
-- Nothing here calculates with totals, which may be above 2^53: they are texts that members add up.
-- Change numbers and times stay far below 2^53.
--
-- KEYS of every function, all with the hash tag of the cluster:
--   1 number   the change number, which grows with each call of schedsvc_sync
--   2 life     drawn when the store is empty; another one means that the store lost its data
--   3 index    sorted set: the rows, by the minute in which they changed last
--   4 rows     hash: the totals
--   5 members  hash: what each member said last, and when
--   6 origins  hash: by the part of a row that follows its origin, the origins that have such a row
--   7 inbox    the beginning of the keys of members' inboxes: sorted sets of rows of others that
--              changed and that the member has not read, by change number
--
-- A member reads rows of what it has served itself, and no others. So a row that changes goes into
-- the inboxes of the members that have a total of the same tenant, class and domain. A row that a
-- member writes for the first time brings it those of the others, but not of its own earlier lives.
--
-- An answer empties the inbox. A member that loses an answer, or its connection, writes all its
-- totals again with ARGV 7 set, and so reads all rows of others again.

local ROW_MINUTES = 60  -- a total is kept for it after its last change
local KEPT_MS = 7200000  -- and all of them, once no member is left
local PRUNED_MAX = 400
local PUT_MAX = 2000  -- arguments of one ZADD, an even number
local TTL_MAX_MS = 18000  -- as no member asks for more
-- A value of `members`: the time (ms) at which the member counts as gone, its incarnation, the
-- number of its last call, the fingerprint of its configuration.
local MEMBER = '^(%d+) (%x+) (%d+) (%x*)$'

-- Members and what they said last, by turns. A member whose end is later than any can be wrote
-- before the clock was set back: its time counts from now.
local function entries(keys, now)
    local all = redis.call('HGETALL', keys[5])
    for i = 1, #all, 2 do
        local due, rest = string.match(all[i + 1], '^(%d+)( .*)$')
        if due and tonumber(due) > now + TTL_MAX_MS then
            all[i + 1] = whole(now + TTL_MAX_MS) .. rest
            redis.call('HSET', keys[5], all[i], all[i + 1])
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
            redis.call('HDEL', keys[5], all[i])
        elseif all[i] == args[1] and incarnation ~= args[2] then
            return {'name', whole(tonumber(due) - now)}
        elseif all[i] ~= args[1] and fingerprint ~= args[3] then
            return {'fingerprint', all[i]}
        end
    end
    local value = whole(now + args[4]) .. ' ' .. args[2] .. ' 0 ' .. args[3]
    redis.call('HSET', keys[5], args[1], value)
    redis.call('DEL', keys[7] .. args[1])
    return {'joined', ''}
end

-- ARGV: member, incarnation.
local function leave(keys, args)
    local mine = redis.call('HGET', keys[5], args[1])
    if mine and select(2, string.match(mine, MEMBER)) == args[2] then
        redis.call('HDEL', keys[5], args[1])
        redis.call('DEL', keys[7] .. args[1])
    end
    return 'left'
end

-- Forget that an origin has a row.
local function disown(keys, row)
    local origin = string.match(row, '^[^/]*/[^/]*/') or ''
    local rest = string.sub(row, #origin + 1)
    local kept = {}
    for other in string.gmatch(redis.call('HGET', keys[6], rest) or '', '%S+') do
        if other ~= origin then
            kept[#kept + 1] = other
        end
    end
    if #kept > 0 then
        redis.call('HSET', keys[6], rest, table.concat(kept, ' '))
    else
        redis.call('HDEL', keys[6], rest)
    end
end

-- Forget what is over: members, with their inboxes, and totals that were idle for long.
local function prune(keys, all, now)
    for i = 1, #all, 2 do
        local due = string.match(all[i + 1], MEMBER)
        if due and tonumber(due) > now then
            redis.call('PEXPIRE', keys[7] .. all[i], KEPT_MS)
        else
            redis.call('HDEL', keys[5], all[i])
            redis.call('DEL', keys[7] .. all[i])
        end
    end
    for _, key in ipairs({keys[3], keys[4], keys[6]}) do
        redis.call('PEXPIRE', key, KEPT_MS)
    end
    local last = math.floor(now / 60000) - ROW_MINUTES
    local old = redis.call('ZRANGE', keys[3], '-inf', last, 'BYSCORE', 'LIMIT', 0, PRUNED_MAX)
    for _, row in ipairs(old) do
        redis.call('ZREM', keys[3], row)
        redis.call('HDEL', keys[4], row)
        disown(keys, row)
    end
end

-- The names of the members that are alive, with spaces between them.
local function alive(all, now)
    local names = {}
    for i = 1, #all, 2 do
        local due = string.match(all[i + 1], MEMBER)
        if due and tonumber(due) > now then
            names[#names + 1] = all[i]
        end
    end
    table.sort(names)
    return table.concat(names, ' ')
end

-- Read a list of origins. Returns whether `own` is one of them, the members among the others that are
-- alive, and the others but for earlier lives of the caller.
local function parse(list, own, member, lives)
    local known, readers, others = false, {}, {}
    for origin in string.gmatch(list, '%S+') do
        local name, life = string.match(origin, '^([^/]*)/([^/]*)/')
        if origin == own then
            known = true
        else
            if name and lives[name] == life then
                readers[#readers + 1] = name
            end
            if name ~= member then
                others[#others + 1] = origin
            end
        end
    end
    return {known, readers, others}
end

-- Write rows and totals of ARGV, and put what changed into inboxes. `lives`: the incarnation of each
-- other member. `again`: the member reads all rows of others again.
local function write(keys, args, now, number, lives, again)
    local own, rests, scored, inboxes, owned = args[9], {}, {}, {}, {}
    local minute, places = math.floor(now / 60000), {}
    for i = 10, #args, 2 do
        rests[#rests + 1] = string.sub(args[i], #own + 1)
        scored[#scored + 1] = minute
        scored[#scored + 1] = args[i]
    end
    redis.call('HSET', keys[4], unpack(args, 10))
    redis.call('ZADD', keys[3], unpack(scored))
    local function put(member, row)
        local list = inboxes[member]
        if list == nil then
            list = {}
            inboxes[member] = list
        end
        list[#list + 1] = number
        list[#list + 1] = row
    end
    local found = redis.call('HMGET', keys[6], unpack(rests))
    for i, rest in ipairs(rests) do
        local list = found[i] or ''
        local place = places[list]  -- many rows have the same origins
        if place == nil then
            place = parse(list, own, args[1], lives)
            places[list] = place
        end
        if not place[1] then
            owned[#owned + 1] = rest
            owned[#owned + 1] = found[i] and (list .. ' ' .. own) or own
        end
        for _, name in ipairs(place[2]) do
            put(name, own .. rest)
        end
        if again or not place[1] then
            for _, origin in ipairs(place[3]) do
                put(args[1], origin .. rest)
            end
        end
    end
    if #owned > 0 then
        redis.call('HSET', keys[6], unpack(owned))
    end
    for name, list in pairs(inboxes) do
        for at = 1, #list, PUT_MAX do
            redis.call('ZADD', keys[7] .. name, unpack(list, at, math.min(#list, at + PUT_MAX - 1)))
        end
    end
end

-- Take the rows that a member has not read out of its inbox. Returns them as sync does, and whether
-- more are left.
local function read(keys, args)
    local limit, inbox = tonumber(args[8]), keys[7] .. args[1]
    local popped = redis.call('ZPOPMIN', inbox, limit)
    if #popped == 0 then
        return '', 'all'
    end
    local names, rows = {}, {}
    for i = 1, #popped, 2 do
        names[#names + 1] = popped[i]
    end
    for i, totals in ipairs(redis.call('HMGET', keys[4], unpack(names))) do
        if totals then  -- else it was forgotten meanwhile
            rows[#rows + 1] = struct.pack('>HH', #names[i], #totals) .. names[i] .. totals
        end
    end
    local is_all = #names < limit or redis.call('ZCARD', inbox) == 0
    return table.concat(rows), is_all and 'all' or 'more'
end

-- Write totals that changed, and read those of others that changed.
-- ARGV: member, incarnation, fingerprint, TTL in ms, number of this call, a random life, whether to
-- read all rows of others again ('1') or not ('0'), the most rows to read, the prefix of the member's
-- own rows, then row and totals by turns. Returns {change number, life, 'all', 'more' or 'lost', rows
-- of others, members}: 'more' if rows are left to read, 'lost' if rows may have been lost because the
-- store had forgotten the member. Each row has the sizes of row and totals before it, two bytes each.
-- If another incarnation has the member's name, or this call is older than one that came, it changes
-- nothing and returns {'0'}.
local function sync(keys, args)
    local now = now_ms()
    local all = entries(keys, now)
    local lives, known = {}, false
    for i = 1, #all, 2 do
        local due, incarnation, call = string.match(all[i + 1], MEMBER)
        if due and all[i] == args[1] then
            known = incarnation == args[2]
            if (not known and tonumber(due) > now)
                or (known and tonumber(call) >= tonumber(args[5])) then
                return {'0'}
            end
        elseif due then
            lives[all[i]] = incarnation
        end
    end
    local value = whole(now + args[4]) .. ' ' .. args[2] .. ' ' .. args[5] .. ' ' .. args[3]
    redis.call('HSET', keys[5], args[1], value)
    redis.call('SET', keys[2], args[6], 'NX')
    local number = redis.call('INCR', keys[1])
    if not known then
        redis.call('DEL', keys[7] .. args[1])
    end
    if #args > 9 then
        write(keys, args, now, number, lives, args[7] == '1')
    end
    all = entries(keys, now)
    if number % 16 == 0 then
        prune(keys, all, now)
    end
    local rows, state = read(keys, args)
    if not known then
        state = 'lost'
    end
    return {whole(number), redis.call('GET', keys[2]), state, rows, alive(all, now)}
end

-- Returns the change number and life, how many rows there are, the time in ms, then member and
-- value by turns.
local function status(keys)
    local out = {
        redis.call('GET', keys[1]) or '0', redis.call('GET', keys[2]) or '',
        whole(redis.call('HLEN', keys[4])), whole(now_ms()),
    }
    for _, part in ipairs(redis.call('HGETALL', keys[5])) do
        out[#out + 1] = part
    end
    return out
end

redis.register_function('schedsvc_join', join)
redis.register_function('schedsvc_leave', leave)
redis.register_function('schedsvc_sync', sync)
redis.register_function{
    function_name = 'schedsvc_status', callback = status, flags = {'no-writes'}}
