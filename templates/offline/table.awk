# The figures of the columns that a question names: asked="who is best in maths" awk -f table.awk a.csv
# → a.csv, maths: highest 95 (Greta), lowest 45 (Finn), average 74.2857, sum 520 of 7 rows
BEGIN {
    FS = "[,;]"
    asked = " " tolower(ENVIRON["asked"]) " "
    if (match(asked, /(under|below|less than|fewer than|over|above|more than) -?[0-9.]+/)) {
        limit = substr(asked, RSTART, RLENGTH)  # "under 60"
        bound = limit
        sub(/.* /, "", bound)
    }
}
function is_named(column) {  # grade is also named by `grades`
    column = tolower(column)
    gsub(/[^a-z0-9]+/, ".", column)
    sub(/s$/, "", column)
    return asked ~ "[^a-z0-9]" column "s?[^a-z0-9]"
}
{ gsub(/\r/, "") }
/"/ { quoted[FILENAME] }  # a comma in quotes would shift the columns: such a file is left out
FNR == 1 {
    split($0, head)
    title = FILENAME
    sub(/.*\//, "", title)
    sub(/\.[^.]*$/, "", title)
    some_files += chosen[FILENAME] = is_named(title)
}
FNR > 1 {
    for (i = 1; i <= NF; i++) {
        key = FILENAME ", " head[i]
        if (FNR == 2 && $i ~ /^ *-?[0-9.]+ *$/) {  # a column of numbers
            keys[++count] = key
            file[key] = FILENAME
            named[key] = is_named(head[i])
            some_columns += named[key]
        }
        if (!(key in file) || $i !~ /[0-9]/) continue
        value = $i + 0
        sum[key] += value
        if (!rows[key]++ || value > high[key]) { high[key] = value; highest[key] = $1 }
        else if (value == high[key]) highest[key] = highest[key] ", " $1
        if (rows[key] == 1 || value < low[key]) { low[key] = value; lowest[key] = $1 }
        else if (value == low[key]) lowest[key] = lowest[key] ", " $1
        if (limit ~ /^[ubfl]/ ? value < bound + 0 : value > bound + 0) found[key] = found[key] "\n" $1 ": " $i
    }
}
END {
    for (i = 1; i <= count; i++) {
        key = keys[i]
        if (file[key] in quoted || (some_files && !chosen[file[key]])) continue
        name = key
        sub(/^\.\//, "", name)
        if (!some_files && !some_columns && length(asked) > 20) offers = offers "\n  the highest " substr(name, index(name, ", ") + 2) " in " substr(name, 1, index(name, ", ") - 1)
        else if (some_columns && !named[key]) continue
        else if (limit) print name ", " limit ":" (found[key] ? found[key] : " none")
        else print name ": highest " high[key] " (" highest[key] "), lowest " low[key] " (" lowest[key] "), average " sum[key] / rows[key] ", sum " sum[key] " of " rows[key] " rows"
        shown += !offers
    }
    if (!shown) print "I find no table (*.csv) with a column of numbers that you name." (offers ? " I can:" offers : "")
}
