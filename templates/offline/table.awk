# The figures of the columns that a question names: asked="who is best in maths" awk -f table.awk a.csv
# → a.csv, maths: highest 95 (Greta), lowest 45 (Finn), average 74.2857, sum 520 of 7 rows
BEGIN {
    asked = " " tolower(ENVIRON["asked"]) " "
    if (match(asked, /(under|below|less than|fewer than|over|above|more than) -?[0-9.]+/)) limit = substr(asked, RSTART, RLENGTH)
    bound = limit
    sub(/.* /, "", bound)  # under 60 → 60
}
function is_named(column) {  # `grades` in a question also names the column grade
    column = tolower(column)
    gsub(/[^a-z0-9]+/, ".", column)
    sub(/s$/, "", column)
    if (asked ~ /how much.*(spen[dt]|paid|pay|cost)/ && column ~ /^(amount|price|cost|euro|sum|total|spent|paid)/) return 1
    return asked ~ "[^a-z0-9]" column "s?[^a-z0-9]"
}
{ sub(/\r$/, "") }
/"/ { quoted[FILENAME] }  # a comma in quotes would shift the columns: such a file is left out
FNR == 1 {
    comma = /;/ ? ";" : ","  # German spreadsheets write Anna;1,5
    split($0, head, comma)
    title = FILENAME
    gsub(/.*\/|\.[^.]*$/, "", title)
    next
}
{
    cells = split($0, cell, comma)
    for (i = 1; i <= cells; i++) {
        if (comma == ";") sub(/,/, ".", cell[i])
        if (cell[i] !~ /^ *-?[0-9]+(\.[0-9]+)? *$/ || FILENAME in quoted) continue
        key = FILENAME ", " head[i]
        value = cell[i] + 0
        if (!rows[key]++) {
            keys[++count] = key
            score[key] = 2 * is_named(head[i]) + is_named(title)
            if (score[key] > best) best = score[key]
            offer[key] = "  the highest " head[i] " in " FILENAME
        }
        sum[key] += value
        if (rows[key] == 1 || value > high[key]) { high[key] = value; highest[key] = "" }
        if (rows[key] == 1 || value < low[key]) { low[key] = value; lowest[key] = "" }
        if (value == high[key] && length(highest[key]) < 200) highest[key] = highest[key] ", " cell[1]
        if (value == low[key] && length(lowest[key]) < 200) lowest[key] = lowest[key] ", " cell[1]
        if (limit ~ /^[ubfl]/ ? value < bound + 0 : value > bound + 0) found[key] = found[key] "\n" cell[1] ": " value
    }
}
END {
    none = !count || !best && length(asked) > 20
    if (none) print "I find no table (*.csv) with a column of numbers that you name." (count ? " I can:" : "")
    for (i = 1; i <= count; i++) {
        key = keys[i]
        line = key ": highest " high[key] " (" substr(highest[key], 3) "), lowest " low[key] " (" substr(lowest[key], 3) "), average " sum[key] / rows[key] ", sum " sum[key] " of " rows[key] " rows"
        if (limit) line = key ", " limit ":" (found[key] ? found[key] : " none")
        if (none) line = offer[key]
        gsub(/\.\//, "", line)
        if (score[key] == best + 0) print line
    }
}
