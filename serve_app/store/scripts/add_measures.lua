-- include add_to
-- args: source, sequence:number, life_ms:number, amounts:list
-- add_measures: add what a process has measured, a name and an amount by turns, to the numbers of all. A call that is
-- repeated has the same sequence, and adds nothing.
local last = K('measured:' .. source)
if num(redis.call('GET', last), 0) >= sequence then return end
redis.call('SET', last, sequence, 'PX', life_ms)
add_to(K('measures'), amounts)
