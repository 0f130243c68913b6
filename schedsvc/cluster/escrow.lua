-- Part of the library: the buckets of quotas, from which members draw chunks.
--
-- Rules:
-- - Level and held amounts of a bucket are at most its limit together. So what all members spend in
--   a time never exceeds what one bucket allows.
-- - A bucket that the store lost, or of which it has an older state, begins again, under another name
--   of its beginning (`born`). Each member that knew it before states what it knew to be left. The
--   least of this counts, less what was spent since: the last caller before the loss knew it exactly.
-- Such a bucket grants nothing for QUIET_MS, in which all members call. An amount that was granted
-- to a member that knew nothing is owed.
-- - A member states what it holds and what it has drawn since it began. The difference is spent. So
--   an answer that got lost is found by the next call, and a call that is repeated counts once.
-- - A chunk of which its member says nothing for CHUNK_MS counts as spent.
-- - An ask is served whole or not at all, and waits at the first bucket of its path that is short.
--   Asks at a bucket are served in their order.
--
-- Amounts are whole units below 2^41, and drawn amounts are counted modulo 2^52, so that every
-- number is exact in a double.
--
-- KEYS: the members whose chunks are recalled and for which buckets (one key for each member, the
-- caller's is named), the name of the store's data (`life`), then one key for each bucket of the call.

local CHUNK_MS = 3000
local ASK_MS = 1500  -- an ask that is not repeated within it is dropped
local QUIET_MS = 1500  -- longer than members are silent
local KEPT_MS = 120000  -- a bucket without calls is full by then, and holds no chunk
local MINUTE_MS = 60000
local STEP_MS = 5000  -- a clock that fell by more was set, and is followed
local WRAP = 4503599627370496
local KINDS = 4
local FIRST = 2  -- keys before those of the buckets
local STATED = 5 * KINDS + 2  -- arguments for each bucket

local function numbers(args, from)
    local out = {}
    for k = 1, KINDS do
        out[k] = tonumber(args[from + k - 1])
    end
    return out
end

-- Whether a value is a list of whole numbers that a double holds.
local function are_amounts(list)
    if type(list) ~= 'table' then
        return false
    end
    for k = 1, KINDS do
        local n = list[k]
        if type(n) ~= 'number' or n ~= math.floor(n) or math.abs(n) > WRAP then
            return false
        end
    end
    return true
end

-- Whether a row is one that these functions have written, and not another program's.
local function is_sound(row)
    if type(row) ~= 'table' or type(row.born) ~= 'string' or type(row.at) ~= 'number'
        or type(row.since) ~= 'number' or type(row.quiet) ~= 'number' or row.at ~= math.floor(row.at)
        or type(row.holders) ~= 'table' or type(row.asks) ~= 'table' then
        return false
    end
    local function ends_within(each, ms)
        return type(each) == 'table' and type(each.due) == 'number' and each.due <= row.at + ms
    end
    for id, holder in pairs(row.holders) do
        if type(id) ~= 'string' or not ends_within(holder, CHUNK_MS)
            or type(holder.call) ~= 'number' or not are_amounts(holder.held)
            or not are_amounts(holder.drawn) then
            return false
        end
    end
    for i, ask in pairs(row.asks) do
        if type(i) ~= 'number' or not ends_within(ask, ASK_MS) or type(ask.name) ~= 'string'
            or not are_amounts(ask.least) then
            return false
        end
    end
    return row.quiet <= row.at + STEP_MS + QUIET_MS and are_amounts(row.rates)
        and are_amounts(row.level) and are_amounts(row.part) and are_amounts(row.gone)
end

local function outstanding(row, k)
    local sum = 0
    for _, holder in pairs(row.holders) do
        sum = sum + holder.held[k]
    end
    return sum
end

-- The present, for a bucket: its time never goes back, unless the clock was set back.
local function tick(row, now)
    if now < row.at - STEP_MS then
        for _, holder in pairs(row.holders) do
            holder.due = holder.due - row.at + now
        end
        for _, ask in ipairs(row.asks) do
            ask.due = ask.due - row.at + now
        end
        row.since, row.quiet = row.since - row.at + now, row.quiet - row.at + now
        row.at = now
    end
    return math.max(row.at, now)
end

-- Fill a bucket up to the present, and forget chunks and asks that are over.
local function settle(row, rates, clock)
    local now = tick(row, clock)
    local elapsed = math.min(now - row.at, MINUTE_MS)
    row.at = now
    for k = 1, KINDS do
        local rate = rates[k]
        row.level[k] = row.level[k] + rate - row.rates[k]
        local room = rate - outstanding(row, k) - row.level[k]
        -- Exact: the rate in whole units a millisecond, and the rest in 60,000ths of a unit.
        local rest = elapsed * (rate % MINUTE_MS) + row.part[k]
        local gain = elapsed * math.floor(rate / MINUTE_MS) + math.floor(rest / MINUTE_MS)
        row.part[k] = rest % MINUTE_MS
        if gain >= room then
            gain, row.part[k] = room, 0
        end
        row.level[k] = math.max(row.level[k] + gain, -rate)
    end
    row.rates = rates
    for id, holder in pairs(row.holders) do
        if holder.due <= now then
            row.holders[id] = nil
        end
    end
    for i = #row.asks, 1, -1 do
        if row.asks[i].due <= now then
            table.remove(row.asks, i)
        end
    end
end

-- `mark`: names the beginning of a bucket that is not there, or is another program's.
local function load(key, rates, clock, mark)
    local data = redis.pcall('GET', key)  -- another program's key may be of another type
    if type(data) == 'string' then
        local is_read, row = pcall(cmsgpack.unpack, data)
        if is_read and is_sound(row) then
            settle(row, rates, clock)
            return row
        end
    end
    return {
        at = clock, rates = rates, level = {unpack(rates)}, part = {0, 0, 0, 0}, holders = {},
        asks = {}, born = mark, since = clock, gone = {0, 0, 0, 0}, quiet = 0,
    }
end

-- The name of the store's data; another one after the store has lost them.
local function life_of(key, mark)
    local life = redis.pcall('GET', key)
    if type(life) ~= 'string' then
        life = mark
        redis.call('SET', key, life)
    end
    return life
end

-- Count what was spent since a bucket began again, for members that say later what they knew.
local function count_gone(row, k, amount)
    if row.at < row.since + MINUTE_MS then
        row.gone[k] = row.gone[k] + math.max(0, amount)
    end
end

-- Give a member so much of a bucket.
local function draw(row, holder, k, amount)
    row.level[k] = row.level[k] - amount
    holder.held[k] = holder.held[k] + amount
    holder.drawn[k] = (holder.drawn[k] + amount) % WRAP
end

-- Take over what a member states; returns what covers its debts, or nil if the call is old.
local function report(row, id, call, drawn, held)
    local holder = row.holders[id]
    if holder and holder.call >= call then
        return nil
    end
    local covered = {0, 0, 0, 0}
    if holder == nil then
        holder = {held = {unpack(held)}, drawn = drawn}
        row.holders[id] = holder
        for k = 1, KINDS do
            row.level[k] = row.level[k] - math.max(0, held[k])
        end
    end
    holder.call = call
    for k = 1, KINDS do
        local back = (holder.drawn[k] - drawn[k]) % WRAP
        if back >= WRAP / 2 then
            back = back - WRAP
        end
        row.level[k] = row.level[k] + back
        count_gone(row, k, holder.held[k] - held[k] - back)
        holder.held[k], holder.drawn[k] = held[k], drawn[k]
        if held[k] < 0 then
            covered[k] = -held[k]
            draw(row, holder, k, covered[k])
        end
        local most = row.rates[k] - outstanding(row, k)
        row.level[k] = math.max(-row.rates[k], math.min(row.level[k], most))
    end
    return covered
end

-- Take over what a member states, and what it knew of a bucket that has begun again since.
-- `known`: the number of its last call about the bucket that was answered.
local function take_over(row, id, call, mark, stated)
    local holder = row.holders[id]
    local is_behind = holder == nil or holder.call < stated.known
    if holder and is_behind and row.born == stated.born then
        row.born, row.since, row.gone = mark, row.at, {0, 0, 0, 0}
    end
    local gone = {unpack(row.gone)}
    local covered = report(row, id, call, stated.drawn, stated.held)
    if covered and stated.born ~= '' and stated.born ~= row.born then
        row.quiet = row.since + QUIET_MS
        for k = 1, KINDS do
            local spent = is_behind and stated.spent[k] or 0
            if holder == nil then
                row.level[k] = row.level[k] - math.max(0, spent - covered[k])
            end
            local more = row.level[k] + outstanding(row, k) - (stated.left[k] - gone[k])
            row.level[k] = math.max(-row.rates[k], row.level[k] - math.max(0, more))
            row.gone[k] = is_behind and gone[k] or row.gone[k]
            count_gone(row, k, spent)
        end
    end
    return covered
end

local function forget_ask(row, name)
    for i = #row.asks, 1, -1 do
        if row.asks[i].name == name then
            table.remove(row.asks, i)
        end
    end
end

-- Returns the ms until an ask can be served at a bucket, at the least; nil if nothing keeps it
-- waiting. `is_first`: it waits for the bucket alone.
local function obstacle(row, name, least)
    local needed, is_wanted = {unpack(least)}, false
    for k = 1, KINDS do
        is_wanted = is_wanted or least[k] > 0
    end
    if not is_wanted then
        return nil
    end
    local is_first = true
    for _, ask in ipairs(row.asks) do
        if ask.name == name then
            break
        end
        is_first = false
        for k = 1, KINDS do
            needed[k] = needed[k] + ask.least[k]
        end
    end
    local wait = math.max(0, row.quiet - row.at)
    local is_short = not is_first or wait > 0
    for k = 1, KINDS do
        local missing = needed[k] - row.level[k]
        if least[k] > 0 and missing > 0 then
            is_short = true
            local units = missing * MINUTE_MS - row.part[k]
            wait = math.max(wait, math.ceil(units / row.rates[k]))
        end
    end
    if is_short then
        return math.max(1, wait), is_first
    end
    return nil
end

-- Ask all other members to return what they hold of a bucket and do not use.
local function recall(row, key, id, mine, least)
    local prefix = string.sub(mine, 1, #mine - #id)
    for other, holder in pairs(row.holders) do
        for k = 1, KINDS do
            if other ~= id and least[k] > row.level[k] and holder.held[k] > 0 then
                put(prefix .. other, key, '')
                redis.call('PEXPIRE', prefix .. other, CHUNK_MS)
                break
            end
        end
    end
end

-- Serve an ask for a path of buckets whole, or let it wait; returns the ms until it can be served,
-- at the least, and at which bucket it waits; two zeros if it was served.
local function serve(rows, keys, id, name, path)
    for _, part in ipairs(path) do
        local row = rows[part.at]
        local wait, is_first = obstacle(row, name, part.least)
        if wait then
            local waits = false
            for _, ask in ipairs(row.asks) do
                if ask.name == name then
                    ask.due, ask.least, waits = row.at + ASK_MS, part.least, true
                end
            end
            if not waits then
                row.asks[#row.asks + 1] = {
                    name = name, due = row.at + ASK_MS, least = part.least}
            end
            for _, other in ipairs(path) do
                if other.at ~= part.at then
                    forget_ask(rows[other.at], name)
                end
            end
            if is_first then
                recall(row, keys[part.at + FIRST], id, keys[1], part.least)
            end
            return wait, part.at
        end
    end
    for _, part in ipairs(path) do
        local row = rows[part.at]
        forget_ask(row, name)
        for k = 1, KINDS do
            local more = 0
            if #row.asks == 0 then
                local half = math.floor((row.level[k] - part.least[k]) / 2)
                more = math.max(0, math.min(part.most[k] - part.least[k], half))
            end
            draw(row, row.holders[id], k, part.least[k] + more)
            part.given = part.given or {}
            part.given[k] = part.least[k] + more
        end
    end
    return 0, 0
end

local function save(row, key, id)
    -- Also if it holds nothing: the answer may be lost, and then the next call finds it.
    row.holders[id].due = row.at + CHUNK_MS
    redis.call('SET', key, cmsgpack.pack(row), 'PX', KEPT_MS)
end

-- ARGV: the member, number of this call, how many asks are withdrawn, their names; for each bucket
-- the limits a minute of four kinds, what the member has drawn of each, what it holds (below 0: owes),
-- what it knew to be left for all members, with what they held and without what it spent since, and
-- that; how it knew the bucket's beginning to be named (empty: not), and in which call; then for each
-- ask its name, the number of its buckets, and for each of these its place
-- among the buckets, the least and the most amounts of the four kinds.
-- Returns {for each bucket four amounts given, four levels, and four amounts that all members hold,
-- for each ask what `serve` returns, buckets of which this member is asked to return what it does not
-- use, the life of the store's data, the name of each bucket's beginning}; or {} if this call is
-- older than one that came.
local function exchange(keys, args)
    local clock, id, call = now_ms(), args[1], tonumber(args[2])
    local mark = id .. ':' .. args[2]
    local at, rows, given = 4, {}, {}
    local gone = {}
    for _ = 1, tonumber(args[3]) do
        gone[#gone + 1] = id .. ' ' .. args[at]
        at = at + 1
    end
    for i = FIRST + 1, #keys do
        local row = load(keys[i], numbers(args, at), clock, mark)
        local covered = take_over(row, id, call, mark, {
            drawn = numbers(args, at + KINDS), held = numbers(args, at + 2 * KINDS),
            left = numbers(args, at + 3 * KINDS), spent = numbers(args, at + 4 * KINDS),
            born = args[at + 5 * KINDS], known = tonumber(args[at + 5 * KINDS + 1]),
        })
        if covered == nil then
            return {}
        end
        for _, name in ipairs(gone) do
            forget_ask(row, name)
        end
        rows[i - FIRST], given[i - FIRST] = row, covered
        at = at + STATED
    end
    local waits = {}
    while at <= #args do
        local name, path = id .. ' ' .. args[at], {}
        local parts = tonumber(args[at + 1])
        at = at + 2
        for i = 1, parts do
            path[i] = {
                at = tonumber(args[at]), least = numbers(args, at + 1),
                most = numbers(args, at + 1 + KINDS),
            }
            at = at + 1 + 2 * KINDS
        end
        local wait, where = serve(rows, keys, id, name, path)
        waits[#waits + 1], waits[#waits + 2] = wait, where
        for _, part in ipairs(path) do
            for k = 1, part.given and KINDS or 0 do
                given[part.at][k] = given[part.at][k] + part.given[k]
            end
        end
    end
    local out, births, life = {}, {}, life_of(keys[2], mark)
    for i, row in ipairs(rows) do
        for k = 1, KINDS do
            out[#out + 1] = given[i][k]
        end
        for k = 1, KINDS do
            out[#out + 1] = row.level[k]
        end
        for k = 1, KINDS do
            out[#out + 1] = outstanding(row, k)
        end
        births[i] = row.born
        save(row, keys[i + FIRST], id)
    end
    local recalled = redis.pcall('HGETALL', keys[1])
    local names = {}
    for i = 1, #recalled, 2 do
        names[#names + 1] = recalled[i]
    end
    if #names > 0 or recalled.err then
        redis.call('DEL', keys[1])
    end
    return {out, waits, names, life, births}
end

redis.register_function('schedsvc_escrow', exchange)
