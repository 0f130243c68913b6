-- Gives functions what a server gives them: redis, cmsgpack and struct, in Lua 5.1, which Valkey and
-- Redis embed. It has the parts that the functions of schedsvc call; whatever else they name is an error.
--
-- The arguments are functions of scripts.py. `command` carries out a command: it returns a text, a
-- number or false; several values as several results; for an error, true and its text.

local command, pack_struct, sha1, pack, unpacked, new_list, extend = ...

local LISTS = {HGETALL = true, HMGET = true, TIME = true, ZPOPMIN = true, ZRANGE = true}

local functions = {}
local redis, struct = {sha1hex = sha1}, {pack = pack_struct}
local cmsgpack = {pack = pack, unpack = unpacked}

local function one(first, text)
    return first == true and {err = text} or first
end

local function many(first, second, ...)
    return first == true and {err = second} or {first, second, ...}
end

function redis.pcall(name, ...)
    if LISTS[name] then
        return many(command(name, ...))
    end
    local found = one(command(name, ...))
    return name == 'SET' and type(found) == 'string' and {ok = found} or found
end

function redis.call(...)
    local found = redis.pcall(...)
    if type(found) == 'table' and found.err then
        error(found)
    end
    return found
end

function redis.register_function(name, callback)
    local flags = {}
    if type(name) == 'table' then
        name, callback, flags = name.function_name, name.callback, name.flags or {}
    end
    local entry = {callback = callback}
    for _, flag in ipairs(flags) do
        entry[flag] = true
    end
    functions[name] = entry
end

local function nonexistent(_, name)
    error('Script attempted to access nonexistent global variable \'' .. tostring(name) .. '\'')
end

local function readonly()
    error('Attempt to modify a readonly table')
end

local GLOBALS = setmetatable({
    redis = redis, cmsgpack = cmsgpack, struct = struct,
    string = string, table = table, math = math, error = error, ipairs = ipairs, next = next,
    pairs = pairs, pcall = pcall, select = select, tonumber = tonumber, tostring = tostring,
    type = type, unpack = unpack,
}, {__index = nonexistent, __newindex = readonly})

-- Returns a server's answer for a value: integers, and lists up to their first nil.
local function answer(value)
    local kind = type(value)
    if kind == 'number' then
        return value < 0 and math.ceil(value) or math.floor(value)
    elseif kind == 'boolean' then
        return value and 1 or nil
    elseif kind ~= 'table' then
        return value
    elseif value.err then
        error(value)
    elseif value.ok then
        return value.ok
    end
    local out, found, count = new_list(), {}, 0
    for i = 1, #value do
        if value[i] == nil then
            break
        end
        count = i
        found[i] = answer(value[i])
    end
    for at = 1, count, 1000 do
        extend(out, unpack(found, at, math.min(count, at + 999)))
    end
    return out
end

-- Load a library. Its first line names it.
local function load(source)
    local chunk, problem = loadstring((string.gsub(source, '^#![^\n]*', '')), '@user_function')
    setfenv(chunk or error(problem), GLOBALS)()
end

-- Return whether a function declares that it writes nothing; nil if there is no such function.
local function reads(name)
    return functions[name] and functions[name]['no-writes'] or functions[name] and false
end

-- Call a function. Returns true and its answer, or false and the text of an error, or an exception of
-- Python, which is a bug of the simulator.
local function run(name, keys, args)
    local done, found = pcall(functions[name].callback, keys, args)
    if done then
        done, found = pcall(answer, found)
    end
    if done then
        return true, found
    end
    return false, type(found) == 'userdata' and found
        or type(found) == 'table' and found.err or 'ERR ' .. tostring(found)
end

return load, reads, run
