-- Part of the library: what operators have set, which is tenants, API keys and modes.
--
-- The function compares rows and never reads them: a member seals and checks what a row says (see
-- signing.py). Any member that names a row can replace it, so no row of a program without the
-- secret can keep its place.
--
-- KEYS, all with the hash tag of the cluster:
--   1 settings:number  grows with each row that is written
--   2 settings:life    drawn when the store is empty; another one means that the store lost its data
--   3 settings:index   sorted set: the places by the number of their last change
--   4 settings:rows    hash: the row of each place


-- Write rows, and read those that changed after a number.
-- ARGV: the number read up to, the most rows to read, a random life, then for each row to write its
-- place, the SHA-1 of the row to replace ('' for none), and the row ('' removes it).
-- Returns {number, life, number read up to, place and row by turns, place and row of what was not
-- written, because another row stands there}.
local function exchange(keys, args)
    local kept = {}
    redis.call('SET', keys[2], args[3], 'NX')
    for i = 4, #args, 3 do
        local row = redis.call('HGET', keys[4], args[i]) or ''
        local sha1 = row == '' and '' or redis.sha1hex(row)
        if sha1 ~= args[i + 1] then
            kept[#kept + 1], kept[#kept + 2] = args[i], row
        elseif args[i + 2] == '' then
            redis.call('HDEL', keys[4], args[i])
            redis.call('ZREM', keys[3], args[i])
        else
            redis.call('HSET', keys[4], args[i], args[i + 2])
            redis.call('ZADD', keys[3], redis.call('INCR', keys[1]), args[i])
        end
    end
    local number, limit = redis.call('GET', keys[1]) or '0', tonumber(args[2])
    local found = redis.call(
        'ZRANGE', keys[3], '(' .. args[1], '+inf', 'BYSCORE', 'LIMIT', 0, limit, 'WITHSCORES')
    local upto, rows = number, {}
    for i = 1, #found, 2 do
        rows[#rows + 1] = found[i]
        rows[#rows + 1] = redis.call('HGET', keys[4], found[i]) or ''
    end
    if #found == 2 * limit then
        upto = whole(tonumber(found[#found]))
    end
    return {number, redis.call('GET', keys[2]), upto, rows, kept}
end

redis.register_function('schedsvc_settings', exchange)
