-- The library of functions that `schedsvc cluster init` loads into the store. library.py puts it
-- together: VERSION, this part, and the other parts, each in a block of its own. A member refuses a
-- store whose functions have another version.
--
-- Numbers in Lua are doubles: 2^53 + 1 is read as 2^53.

local PROBE_MS = 1000

local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number)
    return string.format('%.0f', number)
end

-- Set a field of a table, also if another program has put a key of another type there.
local function put(key, field, value)
    local done = redis.pcall('HSET', key, field, value)
    if type(done) == 'table' then
        redis.call('DEL', key)
        redis.call('HSET', key, field, value)
    end
end

local function version()
    return VERSION
end

-- Write by each command with which the functions write, and leave nothing. A member calls it on each
-- new connection: the store may answer, and refuse all writes or some.
-- KEYS: a key that no other function uses.
local function probe(keys)
    local key = keys[1]
    redis.call('DEL', key)
    redis.call('SET', key, '0', 'PX', PROBE_MS)
    redis.call('INCR', key)
    redis.call('PEXPIRE', key, PROBE_MS)
    redis.call('DEL', key)
    redis.call('HSET', key, 'field', '')
    redis.call('HSETNX', key, 'field', '')
    redis.call('HDEL', key, 'field')
    redis.call('ZADD', key, 0, 'a', 0, 'b')
    redis.call('ZREM', key, 'a')
    redis.call('ZPOPMIN', key)
    return 'written'
end

redis.register_function{
    function_name = 'schedsvc_version', callback = version, flags = {'no-writes'}}
redis.register_function('schedsvc_probe', probe)
