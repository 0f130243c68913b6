-- Part of the library: caps on concurrent requests, and budgets of a day or month.
--
-- A cap is divided into slots. Rules:
-- - A set of pools holds slots, or a member without a set. The next leader of the set takes them
-- over.
-- - A holder states how many slots it keeps: for what runs, and for what it may start. So a call
-- that is repeated counts once. A running request keeps its slot: then the slots are more than the
-- cap, and none is granted until they are fewer.
-- - The slots of a holder that says nothing for SET_MS are free again.
-- - Asks are served in their order. While one waits, the answer asks others to keep no more than a
-- fair part.
--
-- An operator forgives what the buckets of escrow.lua owe, whose rows are read here, too.
--
-- KEYS of schedsvc_slots: what the holders are asked (one key for each, the caller's is named),
-- then one key for each cap. KEYS of schedsvc_budgets: one key for each budget and period. KEYS of
-- schedsvc_forgive: one key for each bucket.

local SET_MS = 60000
local ASK_MS = 1500  -- an ask that is not repeated within it is dropped
local TOLD_MS = 3000
local KEPT_MS = 120000  -- a cap without calls has no holder by then
local STEP_MS = 5000  -- a clock that fell by more was set, and is followed
local MOST = 4503599627370496  -- 2^52
local BUDGET_MS = 3456000000  -- 40 days: longer than a month

-- Read a table; nil if the key is absent, or holds something else.
local function read(key)
    local data = redis.pcall('GET', key)  -- another program's key may be of another type
    if type(data) ~= 'string' then
        return nil
    end
    local is_read, row = pcall(cmsgpack.unpack, data)
    return is_read and type(row) == 'table' and row or nil
end

-- Whether a row is one that these functions have written, and not another program's.
local function is_sound(row)
    if type(row.at) ~= 'number' or type(row.holders) ~= 'table' or type(row.asks) ~= 'table' then
        return false
    end
    for name, each in pairs(row.holders) do
        if type(name) ~= 'string' or type(each) ~= 'table' or type(each.term) ~= 'number'
            or type(each.call) ~= 'number' or type(each.life) ~= 'string'
            or type(each.held) ~= 'number' or not (each.held >= 0 and each.held <= MOST)
            or type(each.due) ~= 'number' or not (each.due <= row.at + SET_MS) then
            return false
        end
    end
    for i, ask in pairs(row.asks) do
        if type(i) ~= 'number' or type(ask) ~= 'table' or type(ask.owner) ~= 'string'
            or type(ask.due) ~= 'number' or not (ask.due <= row.at + ASK_MS) then
            return false
        end
    end
    return row.at == row.at
end

-- Read a cap, without holders and asks that are over.
local function load(key, clock)
    local row = read(key)
    if row == nil or not is_sound(row) then
        row = {at = clock, holders = {}, asks = {}}
    end
    local back = row.at - clock
    if back > STEP_MS then
        for _, holder in pairs(row.holders) do
            holder.due = holder.due - back
        end
        for _, ask in ipairs(row.asks) do
            ask.due = ask.due - back
        end
        row.at = clock
    end
    row.at = math.max(row.at, clock)
    for name, holder in pairs(row.holders) do
        if holder.due <= row.at then
            row.holders[name] = nil
        end
    end
    for i = #row.asks, 1, -1 do
        if row.asks[i].due <= row.at then
            table.remove(row.asks, i)
        end
    end
    return row
end

-- Take the caller's ask out; returns how many precede it, and how many there are without it.
local function take_ask(row, owner)
    local ahead, others = nil, 0
    for i = #row.asks, 1, -1 do
        if row.asks[i].owner == owner then
            ahead = i - 1
            table.remove(row.asks, i)
        end
    end
    others = #row.asks
    return ahead or others, others
end

-- The part of a cap for each of those that hold slots or ask for some.
local function fair_part(row, limit, owner)
    local claims, count = {[owner] = true}, 0
    for name, holder in pairs(row.holders) do
        if holder.held > 0 then
            claims[name] = true
        end
    end
    for _, ask in ipairs(row.asks) do
        claims[ask.owner] = true
    end
    for _ in pairs(claims) do
        count = count + 1
    end
    return math.floor(limit / count)
end

-- ARGV: the holder, its term, the life of its process, the number of this call, then for each cap
-- its limit, how many slots the holder keeps, and how many more it can use. Returns {for each cap:
-- slots held now, slots that are free, slots beyond the cap, 1 if the ask waits; caps and fair
-- parts of which the holder is asked to keep no more, by turns}, or {} if this call is older than
-- one that came, or of an earlier term.
local function slots(keys, args)
    local clock, owner, term = now_ms(), args[1], tonumber(args[2])
    local life, call = args[3], tonumber(args[4])
    local prefix, rows, out = string.sub(keys[1], 1, #keys[1] - #owner), {}, {}
    for i = 2, #keys do
        local row = load(keys[i], clock)
        local mine = row.holders[owner]
        if mine and (mine.term > term or (mine.life == life and mine.call >= call)) then
            return {}
        end
        rows[i] = row
    end
    for i = 2, #keys do
        local row, at = rows[i], 5 + 3 * (i - 2)
        local limit, keep, want = tonumber(args[at]), tonumber(args[at + 1]), tonumber(args[at + 2])
        local mine = row.holders[owner]
        if mine and mine.life ~= life then
            keep = math.max(keep, mine.held)  -- what the earlier leader started may still run
        end
        mine = {term = term, life = life, call = call, held = keep, due = row.at + SET_MS}
        row.holders[owner] = mine
        local free = limit
        for _, holder in pairs(row.holders) do
            free = free - holder.held
        end
        local ahead, others = take_ask(row, owner)
        local waits = 0
        if want > 0 then
            local given = math.min(want, free - ahead)
            if others > 0 then
                local part = math.max(1, fair_part(row, limit, owner)) - mine.held
                -- The first may have one more, so that nothing stays unused.
                given = math.min(given, ahead == 0 and math.max(1, part) or part)
            end
            if given > 0 then
                mine.held, free = mine.held + given, free - given
            else
                table.insert(row.asks, ahead + 1, {owner = owner, due = row.at + ASK_MS})
                waits = 1
                local fair = fair_part(row, limit, owner)
                for name, holder in pairs(row.holders) do
                    if name ~= owner and ahead == 0 and holder.held > 0 then
                        put(prefix .. name, keys[i], fair)
                        redis.call('PEXPIRE', prefix .. name, TOLD_MS)
                    end
                end
            end
        end
        if mine.held == 0 then
            row.holders[owner].due = row.at + TOLD_MS  -- long enough to know an older call
        end
        redis.call('SET', keys[i], cmsgpack.pack(row), 'PX', KEPT_MS)
        out[#out + 1], out[#out + 2] = mine.held, math.max(0, free)
        out[#out + 1], out[#out + 2] = math.max(0, -free), waits
    end
    local told, found = {}, redis.pcall('HGETALL', keys[1])
    for i = 1, #found, 2 do
        local part = tonumber(found[i + 1])
        if part then
            told[#told + 1], told[#told + 2] = found[i], part
        end
    end
    if #found > 0 or found.err then
        redis.call('DEL', keys[1])
    end
    return {out, told}
end

-- ARGV: the member, then what it has spent of each budget in the period of the key.
-- Returns what all other members have spent of each, as texts.
local function budgets(keys, args)
    local out = {}
    for i, key in ipairs(keys) do
        put(key, args[1], args[i + 1])
        redis.call('PEXPIRE', key, BUDGET_MS)
        local sum, all = 0, redis.call('HGETALL', key)
        for k = 1, #all, 2 do
            if all[k] ~= args[1] then
                sum = sum + math.max(0, tonumber(all[k + 1]) or 0)
            end
        end
        out[i] = whole(sum)
    end
    return out
end

-- Let buckets owe nothing. Returns how many did.
local function forgive(keys)
    local found = 0
    for _, key in ipairs(keys) do
        local row, owes = read(key) or {}, false
        for k, level in ipairs(type(row.level) == 'table' and row.level or {}) do
            level = tonumber(level) or 0
            owes = owes or level < 0
            row.level[k] = math.max(0, level)
        end
        if owes then
            redis.call('SET', key, cmsgpack.pack(row), 'PX', KEPT_MS)
            found = found + 1
        end
    end
    return found
end

redis.register_function('schedsvc_slots', slots)
redis.register_function('schedsvc_budgets', budgets)
redis.register_function('schedsvc_forgive', forgive)
