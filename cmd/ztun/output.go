package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// An output is the value of -o.
type output string

const (
	outputText output = "text"
	outputJSON output = "json"
)

func (o *output) String() string { return string(*o) }
func (*output) Type() string     { return "text|json" }

func (o *output) Set(s string) error {
	switch v := output(s); v {
	case outputText, outputJSON:
		*o = v
		return nil
	}
	return fmt.Errorf("want %s or %s", outputText, outputJSON)
}

// addOutput adds the flag -o.
func addOutput(cmd *cobra.Command) *output {
	o := outputText
	cmd.Flags().VarP(&o, "output", "o", "form of the output; keys of the JSON object are only ever added")
	offer(cmd, "output", string(outputText), string(outputJSON))
	return &o
}

// offer has shells complete the value of a flag to one of these, where they would offer files. Without values they offer nothing.
func offer(cmd *cobra.Command, flag string, values ...string) {
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // there is no such flag
	}
}
